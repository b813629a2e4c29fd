"""What a plot, a page or the terminal calls the servers of a benchmark, and how they write its figures."""

from typing import Any

from tasks.common.benchmark_names import BASELINE, OURS

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


def requests(concurrency: int) -> str:
    """'1 request at a time', '16 requests at once'."""
    return "1 request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def counted(count: int, noun: str) -> str:
    """'1 prompt', '16 prompts'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def percent(share: float) -> str:
    """A share; only a whole one reads 100 %, only none at all 0 %: the others get the decimals that they need."""
    decimals = 0
    while share not in (0, 1) and float(f"{100 * share:.{decimals}f}") in (0, 100):
        decimals += 1
    return f"{100 * share:.{decimals}f} %"


def number(value: float) -> str:
    """Tokens per second: a decimal where it says something."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ms(value: float) -> str:
    """Milliseconds as exact as they are worth."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
