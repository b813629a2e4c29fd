"""Run Great Expectations suites on tables and say what was found in words.

Great Expectations 1.24 passes an empty table and a missing value in silence, and reports a missing column as
bad data. So each table is also expected to have rows and a value in every column that is judged, and an
expectation that could not be evaluated is 'broken': the table is at fault, not the data.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import great_expectations as gx
import great_expectations.expectations as gxe
import numpy as np
import pandas as pd

MAX_SAMPLES = 20
# In place of a failure mode, on the expectations that every table has.
GUARD = "guard"
Outcome = Literal["passed", "warned", "failed", "broken"]


@dataclass(frozen=True)
class Table:
    """Rows to judge, and the expectations that judge them.

    Attributes:
        name: plural, for headings: 'samples'.
        frame: has a column `id`, which names a row in messages, and may have `detail`, a remark on that row, and for a column `x`
            a column `x_terms`, which says of what its value was made: '2.68 / 2.156'.
        expectations: each with severity, description (a sentence that holds when it passes) and meta from `because`.
        row: what one row is: 'sample'.
        shown: columns that the page lists row by row; empty for tables that grow with the data.
    """

    name: str
    row: str
    frame: pd.DataFrame
    expectations: list[gxe.Expectation]
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What one expectation found.

    Attributes:
        unexpected: rows that do not meet it (a warning share may allow some).
        samples: the first of them, {"id": ..., "found": ...}.
        failure_mode: id of the failure that it catches, as in the documentation.
    """

    sentence: str
    outcome: Outcome
    severity: str
    expected: str
    observed: str
    unexpected: int
    samples: list[dict[str, str]]
    failure_mode: str
    why: str
    fix: str


@dataclass(frozen=True)
class Judgement:
    """A table's findings, in the order of its expectations."""

    table: Table
    findings: list[Finding] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether there are rows, and a value wherever one is judged."""
        return all(finding.outcome == "passed" for finding in self.findings if finding.failure_mode == GUARD)


def because(failure_mode: str, why: str, fix: str) -> dict[str, str]:
    """The `meta` of an expectation: which failure it catches, what that failure does, what to do about it."""
    return {"failure_mode": failure_mode, "why": why, "fix": fix}


def judge(tables: Iterable[Table]) -> list[Judgement]:
    """Validate every table against its expectations."""
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    source = context.data_sources.add_pandas("gate")
    return [Judgement(table, _validate(source, table)) for table in tables]


def _validate(source: Any, table: Table) -> list[Finding]:
    suite = gx.ExpectationSuite(name=table.name)
    for order, expectation in enumerate([*table.expectations, *_guards(table)]):
        # Results do not come back in the order of the suite.
        expectation.meta = {**(expectation.meta or {}), "order": order}
        suite.add_expectation(expectation)
    asset = source.add_dataframe_asset(table.name).add_batch_definition_whole_dataframe("all")
    judged = replace(table, frame=table.frame.assign(missing=_missing(table)))
    batch = asset.get_batch({"dataframe": judged.frame})
    index = ["id", *(["detail"] if "detail" in table.frame else [])]
    results = batch.validate(
        suite,
        result_format={
            "result_format": "SUMMARY",
            "unexpected_index_column_names": index,
            "partial_unexpected_count": MAX_SAMPLES,
        },
    ).results
    return [_finding(result, judged) for result in sorted(results, key=lambda r: r.expectation_config.meta["order"])]


def _guards(table: Table) -> list[gxe.Expectation]:
    """What Great Expectations would pass in silence."""
    fix = "Run the stage before this gate again: `dvc repro`."
    return [
        gxe.ExpectTableRowCountToBeBetween(
            min_value=1,
            severity="critical",
            description=f"There is at least one {table.row}",
            meta=because(GUARD, "An empty table meets every other expectation.", fix),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="missing",
            value_set=[""],
            severity="critical",
            description=f"No {table.row} lacks a value that is judged here",
            meta=because(GUARD, "What could not be measured would count as good.", fix),
        ),
    ]


def _missing(table: Table) -> pd.Series:
    """For each row the judged columns that hold no value; a column that is not there breaks its own expectation."""
    names = (getattr(e, key, None) for e in table.expectations for key in ("column", "column_A", "column_B"))
    judged = [name for name in dict.fromkeys(names) if name in table.frame]
    missing = pd.Series("", index=table.frame.index, dtype=object)
    for name in judged:
        gaps = table.frame[name].isna()
        missing[gaps] += f"{_words(name)}, "
    return missing.str.removesuffix(", ")


def _finding(result: Any, table: Table) -> Finding:
    config = result.expectation_config
    problem = _exception(result.exception_info)
    severity = config.severity.value
    outcome: Outcome = "passed" if result.success else "failed" if severity == "critical" else "warned"
    summary = result.result
    reason = dict(config.meta)
    if problem:
        outcome = "broken"
        reason["fix"] = (
            f"The table `{table.name}` that this gate reads from the files is broken; the data were not judged. Its columns: "
            f"{', '.join(table.frame.columns.drop('missing'))}. Were the files written by this version? Run the stage before the gate again."
        )
    return Finding(
        sentence=config.description,
        outcome=outcome,
        severity=severity,
        expected=_expected(config.kwargs, table),
        observed=problem or _observed(config.kwargs, summary, table, bool(result.success)),
        unexpected=int(summary.get("unexpected_count", 0)),
        samples=[_sample(row) for row in summary.get("partial_unexpected_index_list", [])],
        failure_mode=reason["failure_mode"],
        why=reason["why"],
        fix=reason["fix"],
    )


def _exception(info: dict[str, Any] | None) -> str:
    """The first exception's message; it comes flat or keyed by metric."""
    nested = [info or {}, *(value for value in (info or {}).values() if isinstance(value, dict))]
    return next((str(one["exception_message"]) for one in nested if one.get("raised_exception")), "")


def _expected(kwargs: dict[str, Any], table: Table) -> str:
    if "column_A" in kwargs:
        text = f"{_words(kwargs['column_A'])} = {_words(kwargs['column_B'])}"
    elif "value_set" in kwargs:
        wanted = list(kwargs["value_set"])
        text = "all" if wanted == [""] else " or ".join(show(value) for value in wanted)
    elif kwargs.get("min_value") is not None or kwargs.get("max_value") is not None:
        low, high = kwargs.get("min_value"), kwargs.get("max_value")
        if low is None:
            text = f"≤ {show(high)}"
        elif high is None:
            text = f"{'>' if kwargs.get('strict_min') else '≥'} {show(low)}"
        else:
            text = show(low) if low == high else f"{show(low)} … {show(high)}"
    else:
        text = "a value" if kwargs.get("column") != "id" else "all different"
    if (mostly := kwargs.get("mostly")) is not None and mostly < 1:
        text = f"{text} in at least {100 * mostly:.4g} % of the {table.row}s" if mostly else "no limit set"
    return text


def _observed(kwargs: dict[str, Any], summary: dict[str, Any], table: Table, passed: bool) -> str:
    """What the column holds: its range, or its distinct values where they are few; how many rows, where some do not."""
    if "observed_value" in summary:
        return show(summary["observed_value"])
    unexpected, total = summary.get("unexpected_count", 0), len(table.frame)
    column = kwargs.get("column")
    if unexpected and total == 1 and column:
        return _worked_out(table.frame, column)
    if unexpected and passed:  # within the share that `mostly` allows
        return f"met by {total - unexpected} of {total} {table.row}s"
    if unexpected:
        return f"not met by {unexpected} of {total} {table.row}s"
    if column is None or column == "id" or kwargs.get("value_set") in ([""], [True]) or not total:
        return f"all {total}"
    values = table.frame[column].dropna()
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        low, high = values.min(), values.max()
        if total == 1:
            return _worked_out(table.frame, column)
        return show(low) if low == high else f"{show(low)} … {show(high)}"
    distinct = values.unique()
    return ", ".join(sorted(map(show, distinct))) if len(distinct) <= 3 else f"{len(distinct)} values"


def _worked_out(frame: pd.DataFrame, column: str) -> str:
    """The value of the only row, with how it came about where the table says so."""
    value, terms = show(frame[column].iloc[0]), f"{column}_terms"
    return f"{value} = {frame[terms].iloc[0]}" if terms in frame else value


def _sample(row: dict[str, Any]) -> dict[str, str]:
    found = [f"{_words(name)} {show(value, 400)}" for name, value in row.items() if name not in ("id", "detail")]
    detail = row.get("detail")
    return {"id": str(row["id"]), "found": "; ".join([", ".join(found), *([detail] if detail else [])]).strip("; ")}


def _words(column: str) -> str:
    return column.replace("_", " ")


def show(value: Any, longest: int = 72) -> str:
    """A value as a person writes it: four significant digits, yes and no, hashes and long texts cut."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 or math.isinf(value) else f"{value:,.0f}"
    if isinstance(value, int | np.integer):
        return str(value) if abs(value) < 10_000 else f"{value:,}"
    text = str(value)
    if not text:
        return "none"
    if re.fullmatch("[0-9a-f]{32,}", text):
        return f"{text[:12]}…"
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
