"""The acceptance length of a benchmark against that of the last one that was accepted: the report that git's HEAD holds.

To accept a report is to commit it.
"""

import json
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd
from pydantic import Field, ValidationError

from tasks.common.errors import DraftlineError
from tasks.common.forms import Form, fault
from tasks.common.git import git
from tasks.common.params import Gates
from tasks.gates.benchmark_files import REPORT, CellKey, Length, headline_cells
from tasks.gates.committed import committed, git_answering
from tasks.gates.report import Comparison
from tasks.gates.suite import Table, because, show

_REPORT = REPORT.as_posix()
# An acceptance length is a figure of these; of another set, or with other steps, it is another figure.
_DEFINE = (
    "steps",
    "topk",
    "draft_tokens",
    "temperature",
    "max_new_tokens",
    "dtype",
    "sets",
    "prompts_sha256",
    "target_sha256",
)
_ALL = "all questions"


class _Speculative(Form):
    accept_length: Length


class _Cell(CellKey):
    accept_length: Length


class _Settings(Form):
    concurrency: list[int] = Field(min_length=1)


class _Accepted(Form):
    """What is read of the report that is committed."""

    speculative: _Speculative
    cells: list[_Cell]
    settings: _Settings


def compare(report: dict[str, Any], gates: Gates) -> Comparison:
    """With the report that is committed at git's HEAD; nothing is left to later runs, which read that file themselves.

    Raises:
        DraftlineError: the report that is committed is damaged, or git does not say whether there is one.
    """
    lengths = _lengths(report)
    with git_answering(_REPORT):
        earlier, against = _committed(report["settings"])
    if earlier is None:
        return Comparison(against, {}, {}, None)
    shown = ("id", "accept_length", "accepted", "drop")
    table = Table("accepted report", "figure", _drops(lengths, earlier), drop_suite(gates), shown)
    return Comparison(f"{against}, acceptance length {show(earlier[_ALL])}", {}, {}, table)


def drop_suite(gates: Gates) -> list[gxe.Expectation]:
    """What must hold of each figure that the accepted report has too."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="drop",
            max_value=gates.max_accept_length_drop,
            severity="critical",
            description="Acceptance length is at most gates.max_accept_length_drop below that of the accepted report",
            meta=because(
                "S10",
                f"The accepted report is the {_REPORT} that is committed: a draft that is accepted less often than that one serves "
                "more slowly.",
                "See what changed since: `git log` and `git diff` of params.yaml and dvc.lock. If the lower figure is to be the new "
                f"measure, accept it: `git add {_REPORT}`, `git commit`, `dvc repro`. To be measured against nothing: "
                f"`git rm --cached {_REPORT}`, `git commit`, `dvc repro`.",
            ),
        )
    ]


def _committed(settings: dict[str, Any]) -> tuple[dict[str, float] | None, str]:
    """Acceptance lengths of that report; None and why, where there is nothing that this one could be held against."""
    try:
        text = committed(_REPORT)
    except ValueError as error:
        raise _damaged(f"not UTF-8 ({error})") from None
    if text is None:
        return None, f"nothing: no {_REPORT} is committed"
    try:
        earlier = json.loads(text)
        _Accepted.model_validate(earlier)
    except ValidationError as error:
        if any(one["type"] != "missing" for one in error.errors()):
            raise _damaged(fault(error)) from None
        return None, f"nothing: the {_REPORT} committed is of another version"
    except (ValueError, RecursionError) as error:
        raise _damaged(f"not valid JSON ({error})") from None
    then = earlier["settings"]
    if any(name not in then for name in _DEFINE):
        return None, f"nothing: the {_REPORT} committed is of another version"
    commit = git("log", "-1", "--format=%h", "HEAD", "--", _REPORT)
    differing = [name for name in _DEFINE if _said(then[name]) != _said(settings.get(name))]
    if differing:
        return None, f"nothing: commit {commit} has {', '.join(f'{name} {_said(then[name])}' for name in differing)}"
    return _lengths(earlier), f"commit {commit}"


def _damaged(what: str) -> DraftlineError:
    commit = git("log", "-1", "--format=%h", "HEAD", "--", _REPORT)
    return DraftlineError(
        f"{_REPORT} as commit {commit} has it: {what}. No acceptance length can be held against it. Accept this benchmark in its place: "
        f"`git add {_REPORT}`, `git commit`, `dvc repro`. To be held against an earlier one: `git checkout COMMIT -- {_REPORT}`, "
        f"`git commit`, and measure again. To be measured against nothing: `git rm --cached {_REPORT}`, `git commit`, `dvc repro`."
    )


def _lengths(report: dict[str, Any]) -> dict[str, float]:
    """Acceptance length of all questions, and of each set where there are several."""
    cells = headline_cells(report)
    by_set = {cell["set"]: float(cell["accept_length"]) for cell in cells} if len(cells) > 1 else {}
    return {_ALL: float(report["speculative"]["accept_length"])} | by_set


def _drops(now: dict[str, float], accepted: dict[str, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": name,
            "accept_length": now.get(name),
            "accepted": then,
            "drop": 1 - now[name] / then if name in now else None,
            "detail": f"{show(now.get(name))}, was {show(then)}",
        }
        for name, then in accepted.items()
    )


def _said(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, list) else str(value)
