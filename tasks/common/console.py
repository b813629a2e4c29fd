"""The terminal, or a log file: tables need to know how wide it is."""


def console():
    """A rich console as wide as the terminal, and wide enough for whole lines where there is none."""
    from rich.console import Console

    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(width=160, highlight=False)
