"""A gate's report: JSON for later stages, one self-contained HTML page for people, a table for the terminal.

Nothing here depends on the clock, the machine or where the files lie: equal data give equal bytes.
"""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.common.files import REPORTS, write_atomically, write_json
from tasks.common.page import render_page
from tasks.gates.suite import GUARD, Finding, Judgement, Table, show

GATES = REPORTS / "gates"
_TEMPLATE = Path(__file__).with_name("page.html")
_WORDS = {"passed": "passed", "warned": "warning", "failed": "failed", "broken": "broken table"}
_COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "broken": "magenta"}
_MAX_LISTED = 400


@dataclass(frozen=True)
class Histogram:
    """A distribution to draw.

    Attributes:
        values: one number a row; what is not finite is left out.
        limits: named vertical lines, such as a limit of the gate.
        log: logarithmic axis, for values that spread over decades.
    """

    title: str
    values: list[float]
    unit: str = ""
    limits: dict[str, float] = field(default_factory=dict)
    log: bool = False


@dataclass(frozen=True)
class Comparison:
    """Of a run with an earlier one. What that is depends on git: while it passes, the JSON says nothing of it.

    Attributes:
        against: what the earlier run is called, or why there is none.
        record: what later runs are held against.
        earlier: what this run is held against; one that fails leaves it to later runs in place of its own.
        table: None where there is no earlier run.
    """

    against: str
    record: dict[str, Any]
    earlier: dict[str, Any]
    table: Table | None


@dataclass(frozen=True)
class Report:
    """All that is said about one run of a gate.

    Attributes:
        unreadable: why nothing could be judged; empty when it could.
        judgements: of every table, that of the comparison among them.
    """

    name: str
    lead: str
    unreadable: str
    figures: dict[str, int | float | str]
    histograms: list[Histogram]
    judgements: list[Judgement]
    comparison: Comparison | None = None

    @cached_property
    def findings(self) -> list[Finding]:
        return [finding for judgement in self.judgements for finding in judgement.findings]

    @cached_property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome in ("failed", "broken")]

    @cached_property
    def warned(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome == "warned"]

    @property
    def passed(self) -> bool:
        return not self.failed and not self.unreadable

    @property
    def page(self) -> Path:
        return GATES / f"{self.name}.html"

    @property
    def shown_figures(self) -> dict[str, int | float | str]:
        """The page's."""
        return self.figures | ({"held against": self.comparison.against} if self.comparison else {})

    def to_json(self) -> dict[str, Any]:
        """What later stages may rely on: the verdict, the figures, every finding. Equal data give equal bytes, whatever git has."""
        compared = self.comparison
        record = {} if compared is None else compared.record if self.passed else compared.earlier
        listed = [
            judgement
            for judgement in self.judgements
            if compared is None
            or judgement.table is not compared.table
            or any(finding.outcome != "passed" for finding in judgement.findings)
        ]
        return {
            "gate": self.name,
            "passed": self.passed,
            **({"unreadable": self.unreadable} if self.unreadable else {}),
            "figures": self.figures,
            **({"record": record} if record else {}),
            "tables": [
                {
                    "name": judgement.table.name,
                    "rows": len(judgement.table.frame),
                    "findings": [asdict(finding) for finding in judgement.findings],
                }
                for judgement in listed
            ],
        }


def write_report(report: Report) -> Path:
    """Write both files and print the table; returns the page."""
    write_json(GATES / f"{report.name}.json", report.to_json())
    write_atomically(report.page, render(report).encode())
    _print(report)
    return report.page


def render(report: Report) -> str:
    """The page: no script, no font, no picture from elsewhere."""
    return render_page(
        _TEMPLATE,
        show=show,
        report=report,
        words=_WORDS,
        guard=GUARD,
        drawings=[_draw(histogram) for histogram in report.histograms],
        listings=[_listing(judgement) for judgement in report.judgements if judgement.table.shown],
    )


def _listing(judgement: Judgement) -> dict[str, Any]:
    table = judgement.table
    shown = [column for column in table.shown if column in table.frame]
    return {
        "name": table.name,
        "columns": shown,
        "numeric": [column for column in shown if table.frame[column].dtype.kind in "if"],
        "rows": table.frame[shown].head(_MAX_LISTED).to_dict("split")["data"],
        "left_out": max(0, len(table.frame) - _MAX_LISTED),
    }


def _draw(histogram: Histogram, bins: int = 32, width: int = 320, height: int = 84) -> dict[str, Any]:
    """Bars and lines of a histogram in the coordinates of its drawing."""
    import numpy as np

    values = np.asarray(histogram.values, dtype=float)
    values = values[np.isfinite(values) & ((values > 0) | (not histogram.log))]
    if not len(values):
        return {"title": histogram.title, "empty": True}
    to_axis = np.log10 if histogram.log else lambda x: x
    ends = [float(values.min()), float(values.max()), *histogram.limits.values()]
    low, high = float(to_axis(min(ends))), float(to_axis(max(ends)))
    if high - low <= 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(to_axis(values), bins=bins, range=(low, high))
    step, tallest = width / bins, counts.max()

    def across(value: float) -> float:
        return round(float((to_axis(value) - low) / (high - low) * width), 2)

    def back(edge: float) -> float:
        return 10**edge if histogram.log else edge

    return {
        "title": histogram.title,
        "unit": histogram.unit,
        "width": width,
        "height": height,
        "log": histogram.log,
        "bars": [
            {
                "x": round(i * step + 0.75, 2),
                "width": round(step - 1.5, 2),
                "height": round(max(1.5, count / tallest * height), 2),
                "text": f"{show(float(back(edges[i])))} to {show(float(back(edges[i + 1])))}: {count}",
            }
            for i, count in enumerate(counts.tolist())
            if count
        ],
        "limits": [
            {"name": name, "x": across(value), "value": show(float(value))} for name, value in histogram.limits.items()
        ],
        "low": show(float(back(low)) if histogram.limits else float(values.min())),
        "high": show(float(back(high)) if histogram.limits else float(values.max())),
        "median": {"x": across(float(np.median(values))), "value": show(float(np.median(values)))},
        "count": len(values),
    }


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    verdict = "passed" if report.passed else "failed"
    table = Table(title=f"gate {report.name}: {verdict}", title_style=f"bold {_COLOURS[verdict]}", title_justify="left")
    for column in ("table", "rows", "expectations", "passed", "warnings", "failed"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for judgement in report.judgements:
        outcomes = [finding.outcome for finding in judgement.findings]
        failed = outcomes.count("failed") + outcomes.count("broken")
        table.add_row(
            judgement.table.name,
            f"{len(judgement.table.frame):,}",
            str(len(outcomes)),
            str(outcomes.count("passed")),
            Text(str(outcomes.count("warned")), style="yellow" if "warned" in outcomes else ""),
            Text(str(failed), style="red" if failed else ""),
        )
    console.print(table)
    for finding in report.warned:
        console.print(f"  warning, not met: {_warning(finding)}", style="yellow", markup=False)
    console.print(f"  {report.page}", highlight=False)


def _warning(finding: Finding) -> str:
    named = [sample["id"] for sample in finding.samples[:3]]
    left = finding.unexpected - len(named)
    rows = f" ({', '.join(named)}{f' and {left:,} more' if left > 0 else ''})" if finding.unexpected else ""
    return f"{finding.sentence}: expected {finding.expected}, found {finding.observed}{rows}"
