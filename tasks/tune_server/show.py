"""What people see of a search."""

from collections.abc import Iterator

from tasks.common.console import console


def show(report: dict) -> None:
    """Print what was measured, what was left out and why, and what follows."""
    terminal = console()
    if any(row["rungs"] for row in report["candidates"]):
        speeds = f"\nTokens per second over the plain server's, {report['concurrency']} at once, by rung"
        terminal.print(speeds, style="italic")
        terminal.print(_candidates(report))
        compared = "The best and what it is compared with" if report["best"] else "What was to be compared"
        terminal.print(f"\n{compared}", style="italic")
        terminal.print(_compared(report))
    terminal.print()
    for sentence in (*_left_out(report), *report["notes"], report["ended"], report["verdict"], *report["advice"]):
        terminal.print(sentence, markup=False)


def _candidates(report: dict):
    table = _table()
    last = max((result["rung"] for row in report["candidates"] for result in row["rungs"]), default=-1)
    for rung in range(last + 1):
        table.add_column(f"rung {rung}", justify="right")
    for row in report["candidates"]:
        speed = {result["rung"]: result["speedup"]["median"] for result in row["rungs"]}
        if speed:
            table.add_row(row["name"], *(f"{speed[rung]:.2f}" if rung in speed else "" for rung in range(last + 1)))
    return table


def _compared(report: dict):
    table = _table()
    for column in ("is", "rung", "questions", "speed-up", "from", "to", "tok/s", "plain", "acceptance", "break-even"):
        table.add_column(column, justify="left" if column == "is" else "right")
    for row in report["comparison"]:
        found = row["result"]
        if found is None:
            table.add_row(row["row"], row["name"], "dropped" if row["failed"] else "not measured")
            continue
        speed, reached, needed = found["speedup"], found["accept_length"], found["break_even_accept_length"]
        table.add_row(
            row["row"],
            row["name"],
            str(found["rung"]),
            str(found["questions"]),
            *(f"{speed[name]:.2f}" for name in ("median", "min", "max")),
            f"{found['tokens_per_s']:.1f}",
            f"{found['plain_tokens_per_s']:.1f}",
            f"{reached:.2f}" if reached else "",
            f"{needed:.2f}" if needed else "",
        )
    return table


def _left_out(report: dict) -> Iterator[str]:
    """Servers that were not started or failed, those of one reason in one sentence."""
    reasons: dict[str, list[str]] = {}
    for row in report["candidates"]:
        if row["pruned"] or row["failed"]:
            kind = "dropped" if row["failed"] else "not started"
            reasons.setdefault(f"{kind}: {row['failed'] or row['pruned']}", []).append(row["name"])
    for reason, servers in reasons.items():
        yield f"{', '.join(servers)}: {reason}."


def _table():
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("server", style="bold", overflow="fold")
    return table
