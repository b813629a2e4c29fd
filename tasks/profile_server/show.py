"""The profile as tables for the terminal: step times with the acceptance length they ask for, then a step by part."""

from tasks.common.console import console


def show(report: dict) -> None:
    """Print what was measured without the profiler, then what the traces say, and which is which."""
    terminal = console()
    rows, settings = report["by_requests"], report["settings"]
    terminal.print(_step_times(rows))
    terminal.print(_by_part("A plain step, traced", [row["plain_step"] for row in rows], rows))
    terminal.print(_by_part("A draft-plus-verify round, traced", [row["round"] for row in rows], rows))
    terminal.print(
        f"SGLang {settings['version']}, {settings['device']}, {settings['dtype']}, steps {settings['steps']}, top-k "
        f"{settings['topk']}, draft tokens {settings['draft_tokens']}. Under the profiler a plain step took "
        f"{_times_as_long(rows, 'plain_step')} times as long as without it, a round {_times_as_long(rows, 'round')}"
        f"{'; GPU times are those of kernels' if _on_gpu(rows) else ''}.",
        markup=False,
        soft_wrap=True,
    )


def _step_times(rows: list[dict]):
    table = _table("Step times, without the profiler", rows)
    table.add_row("plain step, ms", *(f"{row['plain_step_ms']:.2f}" for row in rows))
    table.add_row("round, ms", *(f"{row['round_ms']:.2f}" for row in rows))
    table.add_row("break-even acceptance length", *(f"{row['break_even_accept_length']:.2f}" for row in rows))
    if _on_gpu(rows):
        for name, kind in (("plain step", "plain_step"), ("round", "round")):
            idle = (f"{row[kind]['gpu_idle_ms']:.2f}  {row[kind]['gpu_idle_share']:.0%}" for row in rows)
            table.add_row(f"GPU idle in a {name}, ms", *idle)
    return table


def _on_gpu(rows: list[dict]) -> bool:
    return "gpu_idle_ms" in rows[0]["round"]


def _times_as_long(rows: list[dict], kind: str) -> str:
    """Of each number of requests; below 1 is noise between two measurements."""
    untraced = {"plain_step": "plain_step_ms", "round": "round_ms"}[kind]
    return ", ".join(f"{row[kind]['traced_ms'] / row[untraced]:.2f}" for row in rows)


def _by_part(title: str, taken: list[dict], rows: list[dict]):
    on_gpu = _on_gpu(rows)
    table = _table(f"{title}: {'host ms, share of it | GPU ms' if on_gpu else 'host ms, share of it'}", rows)

    def cell(host: float, share: float, gpu: float | None) -> str:
        text = f"{host:.2f} {share:4.0%}"
        return f"{text} | {gpu:.3f}" if on_gpu else text

    for parts in zip(*(step["parts"] for step in taken), strict=True):
        table.add_row(parts[0]["part"], *(cell(p["host_ms"], p["host_share"], p.get("gpu_ms")) for p in parts))
        passes = taken[0].get("draft_passes", 0)
        if parts[0]["part"] == "draft" and passes > 1:
            each = (step["draft_pass"] | {"whole": step["traced_ms"]} for step in taken)
            table.add_row(
                f"  each of its {passes} passes",
                *(cell(e["host_ms"], e["host_ms"] / e["whole"], e.get("gpu_ms")) for e in each),
            )
    table.add_row("whole step", *(cell(step["traced_ms"], 1, step.get("gpu_busy_ms")) for step in taken))
    if on_gpu:
        table.add_row("GPU idle, traced", *(f"{step['gpu_idle_traced_ms']:.3f}" for step in taken))
    return table


def _table(title: str, rows: list[dict]):
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column("requests at once", style="bold")
    for row in rows:
        table.add_column(str(row["requests"]), justify="right")
    return table
