"""Which rows of a benchmark's table a plot, a page or the terminal shows, and what they call its servers."""

from typing import Any

from tasks.common.benchmark_names import BASELINE, OURS, POOLED

_LABELS = {OURS: "this draft", BASELINE: "plain server"}


def label(arm: str) -> str:
    """What people read for the name of a server: the exported draft's own is 'speculative' in every table."""
    return _LABELS.get(arm, arm)


def heading(draft: str) -> str:
    """Of a draft's table."""
    return label(draft).capitalize() if draft == OURS else f"Draft {draft}"


def of_ours(report: dict[str, Any], finding: str) -> str:
    """A finding on the exported draft, which says so where others are measured beside it."""
    return f"This draft: {finding[0].lower()}{finding[1:]}" if len(report["drafts"]) > 1 else finding


def by_draft(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Greedy cells of all sets together, by draft, in ascending order of concurrency; the exported draft is the first."""
    cells = report["cells"]
    names = {cell["set"] for cell in cells}
    wanted = POOLED if POOLED in names else next(iter(names))
    lowest = min(cell["temperature"] for cell in cells)
    drafts = sorted(dict.fromkeys(cell["draft"] for cell in cells), key=lambda draft: draft != OURS)
    return {
        draft: sorted(
            (c for c in cells if (c["draft"], c["set"], c["temperature"]) == (draft, wanted, lowest)),
            key=lambda cell: cell["concurrency"],
        )
        for draft in drafts
    }


def requests(concurrency: int) -> str:
    """'1 request at a time', '16 requests at once'."""
    return "1 request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def counted(count: int, noun: str) -> str:
    """'1 prompt', '16 prompts'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def percent(share: float) -> str:
    """A share; only a whole one reads 100 %, only none at all 0 %."""
    rounded = f"{100 * share:.0f}"
    exact = {0.0: "0", 1.0: "100"}.get(share)
    return f"{rounded if exact or rounded not in ('0', '100') else f'{100 * share:.1f}'} %"


def number(value: float) -> str:
    """Tokens per second: a decimal where it says something."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ms(value: float) -> str:
    """Milliseconds as exact as they are worth."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
