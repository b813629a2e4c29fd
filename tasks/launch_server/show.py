"""What people see of a launch: the plan with its reasons, and the parity of each slot."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.common.console import console
from tasks.common.server_plan import ServerPlan

if TYPE_CHECKING:
    from tasks.launch_server.probe import SlotParity


def show_plan(plan: ServerPlan) -> None:
    """Print every setting with its reason, then the line to copy."""
    from rich.table import Table

    table = Table(title=f"The {plan.kind} server", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", style="bold", overflow="fold")
    table.add_column("why", style="dim", min_width=40)
    for setting in (*plan.environment, *plan.flags):
        table.add_row(" ".join((setting.name, *setting.values)), setting.reason)
    table.add_row(
        "--weight-version <nonce>", "new at each start and in every answer: no stale server passes for this one"
    )
    terminal = console()
    terminal.print(table)
    environment = " ".join(f"{s.name}={shlex.quote(' '.join(s.values))}" for s in plan.environment)
    terminal.print(f"\n{environment} {shlex.join(plan.command('<nonce>'))}\n", soft_wrap=True, markup=False)


def show_parity(parity: "Sequence[SlotParity]", limit: float) -> None:
    """Print each slot of each replayed sample, with the figure of the wrong reading beside it."""
    from rich.table import Table

    table = Table(
        title=f"Parity: the server's aux states against the dump, limit {limit:g}", title_justify="left", box=None
    )
    for heading in ("sample", "slot", "layer", "relative error", "with ids + 1", "cosine", "norm ratio"):
        table.add_column(heading, justify="left" if heading == "sample" else "right")
    table.add_column("first values of the last token", no_wrap=True)
    for row in parity:
        passed = row.agreement.relative_error <= limit
        table.add_row(
            row.sample,
            str(row.slot),
            str(row.layer),
            f"[{'green' if passed else 'bold red'}]{row.agreement.relative_error:.1e}",
            f"{row.shifted.relative_error:.2f}",
            f"{row.agreement.cosine:.6f}",
            f"{row.agreement.norm_ratio:.6f}",
            f"served {_five(row.first_served)}\ndumped {_five(row.first_expected)}",
        )
    console().print(table)


def _five(values: list[float]) -> str:
    return " ".join(f"{value:8.3f}" for value in values)
