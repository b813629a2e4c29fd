"""Checks as people read them: a row each, then what to do about those that are not ok."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tasks.common.check import Check

_LOG_WIDTH = 100
_STYLE = {"ok": "green", "warning": "yellow", "error": "bold red", "not applicable": "dim"}


def print_checks(checks: list[Check], console: Console) -> None:
    """Print the table and the fixes: without colour, and as wide as a log, where there is no terminal."""
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        verdict = "-" if check.verdict == "not applicable" else check.verdict
        table.add_row(check.id, Text(verdict, _STYLE[check.verdict]), Text(check.found))
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(Text(f"{check.verdict}: {check.id}", _STYLE[check.verdict]))
            console.print(Padding(Text(f"Expected: {check.expected}. {check.why}\n{check.fix}"), (0, 0, 0, 4)))
            console.print()
