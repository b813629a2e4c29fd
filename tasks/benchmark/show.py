"""The benchmark in tables for the terminal."""

from tasks.benchmark.wording import counted, heading, ms, number, percent, requests
from tasks.common.benchmark_names import OURS, POOLED
from tasks.common.console import console

# A log or a chat message shows lines of this many columns without breaking them.
_WIDTH = 100
_WORDS = (
    "AL: acceptance length; needs: that from which on the draft pays, the break-even. tok/s and plain: with the draft and on the plain "
    "server, all requests together over all repeats, prefill included; their ratio is the speed-up. ms | plain: median time between two "
    "tokens."
)


def show(report: dict) -> None:
    """Print what was measured, acceptance beside all that it depends on: the headline, the cells, what follows."""
    terminal = console()
    width = min(terminal.width, _WIDTH)
    tables = [
        _cells(draft, [cell for cell in report["cells"] if cell["draft"] == draft])
        for draft in sorted(report["drafts"], key=lambda draft: draft != OURS)
    ]
    for table in (_headline(report), *tables):
        terminal.print(table, width=width)
        terminal.print()
    terminal.print(_WORDS, width=width, markup=False)
    terminal.print()
    for sentence in report["advice"]:
        terminal.print(sentence, width=width, markup=False)


def _headline(report: dict):
    from rich.table import Table
    from rich.text import Text

    speculative, settings = report["speculative"], report["settings"]
    low, high = report["speedup_interval"]
    predicted = report["predicted_accept_length"]
    rows = {
        "acceptance length": f"{speculative['accept_length']:.3f} of at most {settings['steps'] + 1} "
        f"({speculative['correct_drafts']} draft tokens in {speculative['verify_rounds']} rounds"
        + (f"; predicted {predicted:.3f})" if predicted is not None else ")"),
        "survival": ", ".join(percent(share) for share in speculative["survival"]),
        "tokens per second": f"{number(speculative['tokens_per_s'])} with the draft, "
        f"{number(report['baseline']['tokens_per_s'])} without",
        "speed-up": f"{report['speedup']:.2f} (95 %: {low:.2f} to {high:.2f}), {requests(settings['concurrency'][0])}; "
        f"break-even at an acceptance length of {report['break_even_accept_length']:.2f}",
        "lossless": _lossless(report),
        **{
            f"  {row['domain']}": f"{row['accept_length']:.2f}, speed-up {row['speedup']:.2f}, {counted(row['prompts'], 'prompt')}"
            for row in report["by_domain"]
        },
        "measured": f"{settings['measured']}, {settings['machine']}",
        "settings": f"SGLang {settings['version']}, {settings['device']}, {settings['dtype']}, steps {settings['steps']}, "
        f"top-k {settings['topk']}, draft tokens {settings['draft_tokens']}, greedy, {settings['max_new_tokens']} new "
        f"tokens, {counted(settings['prompts'], 'prompt')} x {settings['repeats']}, servers {settings['servers']}",
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, found in rows.items():
        table.add_row(Text(name), Text(found))  # ids and domains are no markup
    return table


def _lossless(report: dict) -> str:
    if report["lossless"]:
        return "yes: greedy text is the same"
    parted = report["first_difference"]
    return (
        f"NO: {percent(report['agreement']['answers'])} of answers are the same; first difference in prompt "
        f"{parted['prompt']}, token {parted['position']}"
    )


def _cells(draft: str, cells: list[dict]):
    """A line a set, concurrency and temperature; what acceptance must reach stands beside what it does."""
    from rich.table import Table

    table = Table(title=heading(draft), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("set", max_width=14, no_wrap=True)
    columns = ("at once", "temp.", "AL", "needs", "tok/s", "plain", "speed-up (95 %)", "ms | plain")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in sorted(cells, key=lambda cell: cell["temperature"]):
        low, high = cell["speedup_interval"]
        reached = cell["accept_length"] >= cell["break_even_accept_length"]
        latency, plain = cell["inter_token_ms"], cell["baseline_inter_token_ms"]
        table.add_row(
            "all sets" if cell["set"] == POOLED else cell["set"],
            str(cell["concurrency"]),
            f"{cell['temperature']:g}",
            f"{cell['accept_length']:.2f}",
            f"[{'green' if reached else 'red'}]{cell['break_even_accept_length']:.2f}[/]",
            number(cell["tokens_per_s"]["pooled"]),
            number(cell["baseline_tokens_per_s"]["pooled"]),
            f"{cell['speedup']:.2f} ({low:.2f}-{high:.2f})",
            f"{ms(latency['p50'])} | {ms(plain['p50'])}" if latency["p50"] and plain["p50"] else "-",
        )
    return table
