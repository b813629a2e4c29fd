"""What people see of a server's plan: every setting with its reason."""

import shlex

from tasks.common.console import console
from tasks.common.server_plan import ServerPlan

_WORD = "draftline"


def show_plan(plan: ServerPlan) -> None:
    """Print every setting with its reason, then the line to copy."""
    from rich.table import Table

    table = Table(title=f"The {plan.kind} server", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", style="bold", overflow="fold")
    table.add_column("why", style="dim", min_width=40)
    for setting in (*plan.environment, *plan.flags):
        table.add_row(" ".join((setting.name, *setting.values)), setting.reason)
    table.add_row(f"--weight-version {_WORD}", "any word: every answer carries it, and one's own tells servers apart")
    terminal = console()
    terminal.print(table)
    environment = " ".join(f"{s.name}={shlex.quote(' '.join(s.values))}" for s in plan.environment)
    terminal.print(f"\n{environment} {shlex.join(plan.command(_WORD))}\n", soft_wrap=True, markup=False)
