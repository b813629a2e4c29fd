"""The acceptance length of a benchmark against that of the last one that was accepted: the report that git's HEAD holds.

To accept a report is to commit it.
"""

import json
from subprocess import CalledProcessError
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.files import REPORTS
from tasks.common.git import git
from tasks.common.params import Gates
from tasks.gates.report import Comparison
from tasks.gates.suite import Table, because, show

_REPORT = (REPORTS / "benchmark.json").as_posix()
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
    "target",
)
_ALL = "all questions"


def compare(report: dict[str, Any], gates: Gates) -> Comparison:
    """With the report that is committed at git's HEAD; nothing is left to later runs, which read that file themselves."""
    lengths = _lengths(report)
    earlier, against = _committed(report["settings"])
    if earlier is None:
        return Comparison(against, {}, {}, None)
    shown = ("id", "accept_length", "accepted", "drop")
    table = Table("accepted report", "figure", _drops(lengths, earlier), drop_suite(gates), shown)
    return Comparison(f"{against}, acceptance length {show(earlier[_ALL])}", {}, {}, table)


def headline_cells(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell a set: our draft's, greedy, at the lowest concurrency. Pooled they are the report's headline."""
    lowest = min(report["settings"]["concurrency"])
    return [
        cell
        for cell in report["cells"]
        if (cell["draft"], cell["concurrency"], cell["temperature"]) == ("speculative", lowest, 0)
        and cell["set"] != "all"
    ]


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
        earlier = json.loads(git("cat-file", "blob", f"HEAD:./{_REPORT}"))
        lengths = _lengths(earlier)
        then = earlier["settings"]
        differing = [name for name in _DEFINE if _said(then[name]) != _said(settings[name])]
    except (OSError, CalledProcessError):
        return None, f"nothing: no {_REPORT} is committed"
    except (ValueError, KeyError, TypeError):
        return None, f"nothing: the {_REPORT} committed is of another version"
    commit = git("log", "-1", "--format=%h", "HEAD", "--", _REPORT)
    if differing:
        return None, f"nothing: commit {commit} has {', '.join(f'{name} {_said(then[name])}' for name in differing)}"
    return lengths, f"commit {commit}"


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
    return ", ".join(sorted(value)) if isinstance(value, list) else str(value)
