"""reports/benchmark.html: the benchmark for whoever decides whether to serve with the draft. One file, nothing from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from tasks.benchmark.drawing import Plot
from tasks.benchmark.plots import left_out
from tasks.benchmark.wording import heading, ms, number, percent, requests
from tasks.common.benchmark_names import OURS, POOLED
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
        conditions=_plain(report["settings"]),
        POOLED=POOLED,
        heading=heading,
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
    draft = "this draft" if len(report["drafts"]) > 1 else "the draft"
    words = {
        "good": f"{report['speedup']:.2f} times as fast with {draft}",
        "bad": f"Slower with {draft}: {report['speedup']:.2f} times",
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


def _plain(settings: dict) -> dict[str, str]:
    """Settings of the servers as people write them; those that nobody set, and those without effect, are left out."""
    conditions, words = settings["conditions"], {True: "yes", False: "no"}
    idle = {"disable_cuda_graph"} if settings["device"] == "cpu" else set()
    if conditions.get("decode_attention_backend") and conditions.get("prefill_attention_backend"):
        idle.add("attention_backend")  # SGLang goes by the other two
    shown = {name: value for name, value in conditions.items() if value is not None and name not in idle}
    turned = {
        name.removeprefix("disable_"): not value if name.startswith("disable_") else value
        for name, value in shown.items()
    }
    return {
        name.replace("_", " "): words[value] if isinstance(value, bool) else str(value)
        for name, value in turned.items()
    }
