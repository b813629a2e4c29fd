"""reports/benchmark.html: the benchmark for whoever decides whether to serve with the draft. One file, nothing from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from tasks.benchmark.arms import OURS
from tasks.benchmark.cells import POOLED, label, ms, number, percent, requests
from tasks.benchmark.drawing import Plot
from tasks.benchmark.plots import left_out
from tasks.common.files import REPORTS, write_atomically
from tasks.common.page import render_page

PAGE = REPORTS / "benchmark.html"
_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: dict, plots: Sequence[Plot], path: Path = PAGE) -> None:
    write_atomically(path, render(report, plots).encode())


def render(report: dict, plots: Sequence[Plot]) -> str:
    """The page as HTML."""
    from markupsafe import Markup

    kind, verdict = _verdict(report)
    return render_page(
        _TEMPLATE,
        report=report,
        settings=report["settings"],
        kind=kind,
        verdict=verdict,
        plots=[(plot.title, plot.about, Markup(plot.svg)) for plot in plots],
        left_out=left_out(report),
        tables=_tables(report),
        conditions=_plain(report["settings"]["conditions"]),
        OURS=OURS,
        POOLED=POOLED,
        label=label,
        ms=ms,
        number=number,
        percent=percent,
        requests=requests,
        judge=judge,
    )


def judge(low: float, high: float) -> str:
    """What an interval of the speed-up says: good, bad, or warn where it holds 1."""
    return "good" if low > 1 else "bad" if high < 1 else "warn"


def _verdict(report: dict) -> tuple[str, str]:
    kind = judge(*report["speedup_interval"])
    words = {
        "good": f"{report['speedup']:.2f} times as fast with the draft",
        "bad": f"Slower with the draft: {report['speedup']:.2f} times",
        "warn": f"No difference shown: {report['speedup']:.2f} times",
    }
    return kind, words[kind]


def _tables(report: dict) -> list[dict]:
    """The cells by draft: greedy before sampled, and of each set, the pooled one first, ascending concurrency."""
    sets = [POOLED, *report["settings"]["sets"]]
    return [
        {
            "draft": draft,
            **about,
            "cells": sorted(
                (cell for cell in report["cells"] if cell["draft"] == draft),
                key=lambda cell: (cell["temperature"], sets.index(cell["set"]), cell["concurrency"]),
            ),
        }
        for draft, about in sorted(report["drafts"].items(), key=lambda item: item[0] != OURS)
    ]


def _plain(conditions: dict) -> dict[str, str]:
    """Settings of the servers as people write them; those that nobody set are left out."""
    words = {True: "yes", False: "no"}
    return {
        name.replace("_", " "): words[value] if isinstance(value, bool) else str(value)
        for name, value in conditions.items()
        if value is not None
    }
