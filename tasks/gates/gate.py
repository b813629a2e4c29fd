"""How every gate runs: read the files into tables, judge them, write the report, stop the chain on a breach."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tasks.common.errors import DraftlineError
from tasks.common.files import remove, require_writable
from tasks.common.tracking import Tracker
from tasks.gates.report import GATES, Comparison, Histogram, Report, write_report
from tasks.gates.suite import Finding, Judgement, Table, judge


@dataclass(frozen=True)
class Gate:
    """What a gate read.

    Attributes:
        figures: headline counts, label to value.
        comparison: with an earlier run, for gates that know one.
    """

    tables: list[Table]
    figures: dict[str, int | float | str] = field(default_factory=dict)
    histograms: list[Histogram] = field(default_factory=list)
    comparison: Comparison | None = None


def run_gate(name: str, lead: str, build: Callable[[], Gate], tracker: Tracker) -> None:
    """Judge what `build` read and write reports/gates/<name>.json and .html, whatever comes out.

    Args:
        lead: what this boundary guards, a sentence or two for the page.

    Raises:
        DraftlineError: the report cannot be written, an input cannot be read, or a critical expectation failed; names gate,
            expectations, samples and the fix.
    """
    require_writable(GATES)
    for kind in ("json", "html"):  # what ends this gate without a verdict leaves no earlier one in its place
        remove(GATES / f"{name}.{kind}")
    unreadable = ""
    try:
        gate = build()
    except DraftlineError as error:
        gate, unreadable = Gate([]), str(error)
    compared = gate.comparison.table if gate.comparison else None
    judgements = judge([*gate.tables, *([compared] if compared else [])])
    report = Report(name, lead, unreadable, gate.figures, gate.histograms, judgements, gate.comparison)
    page = write_report(report)
    tracker.log_metrics({"expectations": len(report.findings), "expectations_failed": len(report.failed)})
    tracker.log_artifact(page)
    if unreadable:
        raise DraftlineError(f"gate {name}: an input cannot be read, so nothing was judged.\n{unreadable}")
    if report.failed:
        raise DraftlineError(_failure(name, report, judgements))


def _failure(name: str, report: Report, judgements: list[Judgement]) -> str:
    lines = [
        f"gate {name}: {len(report.failed)} of {len(report.findings)} expectations failed (all of them: {report.page})"
    ]
    return "\n".join([*lines, *failed_paragraphs(judgements)])


def failed_paragraphs(judgements: list[Judgement]) -> list[str]:
    """Each critical expectation that was not met: what was found, in which samples, why it matters, the fix."""
    return [
        _paragraph(judgement.table, finding)
        for judgement in judgements
        for finding in judgement.findings
        if finding.outcome in ("failed", "broken")
    ]


def _paragraph(table: Table, finding: Finding) -> str:
    what = f"- not met: {finding.sentence} [{finding.failure_mode}]"
    if finding.outcome == "broken":
        return f"- broken table {table.name}: {finding.observed}\n  {finding.fix}"
    lines = [f"{what}\n  expected {finding.expected}, found {finding.observed}"]
    named = finding.samples[:5]
    lines += [f"    {sample['id']}: {sample['found']}" for sample in named]
    if finding.unexpected > len(named):
        lines.append(f"    and {finding.unexpected - len(named)} more")
    lines.append(f"  {finding.why} {finding.fix}")
    return "\n".join(lines)
