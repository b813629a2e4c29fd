"""The one exception that people at a terminal are meant to read, and how a signal is told from a failure."""

import signal


class DraftlineError(Exception):
    """A sentence or two: what is wrong, where (file, line, field, sample), what was expected, the fix.

    `ending_in_words` prints it without a traceback and exits 1, with the notes that were added on its way (what is kept,
    and where). Anything else that is raised is a bug and keeps its traceback.
    """


def signal_of(error: BaseException) -> signal.Signals | None:
    """The signal that raised this exception where `exit_on_signals` was called; None for any other."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
    return signal.Signals(code - 128) if code - 128 in signal.valid_signals() else None


def in_a_line(error: BaseException) -> str:
    """Why something ended early, for a report: the name of the signal, or what the error says."""
    if number := signal_of(error):
        return f"{number.name}."
    return " ".join(str(error).split()) or type(error).__name__
