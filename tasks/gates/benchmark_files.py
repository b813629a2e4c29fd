"""What the gate reads of a benchmark: its report and its answers. A damaged file is one sentence: file, field or column, fix."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import ConfigDict, Field, model_validator

from tasks.common.benchmark_names import OURS, POOLED
from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS
from tasks.common.forms import Form, read_form
from tasks.gates.benchmark_suite import AGAIN

REPORT, PROMPTS = REPORTS / "benchmark.json", REPORTS / "benchmark_prompts.csv"
_DAMAGED = f"It is damaged, or was written by another version. {AGAIN}"
_TEXTS = ("prompt", "domain")
_NUMBERS = (
    "repeat",
    "answer_tokens",
    "baseline_tokens",
    "verify_rounds",
    "correct_drafts",
    "baseline_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
)
# Empty where no round ran, or where no token differs.
_OPTIONAL = ("accept_length", "first_difference")

_Count = Annotated[int, Field(ge=0, le=10**12)]
Length = Annotated[float, Field(ge=1)]
_Speed = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Speeds(Form):
    pooled: _Speed
    median: _Speed
    min: _Speed
    max: _Speed


class CellKey(Form):
    """What tells a cell from the others."""

    draft: str
    set: str
    concurrency: int
    temperature: float


class _Cell(CellKey):
    requests: _Count
    repeats: _Count
    accept_length: Length
    survival: list[float]
    verify_rounds: _Count
    correct_drafts: _Count
    tokens_per_s: _Speeds
    baseline_tokens_per_s: _Speeds
    speedup: float
    break_even_accept_length: float
    agreement: _Share | None

    @model_validator(mode="after")
    def _greedy_answers_were_compared(self) -> "_Cell":
        if self.temperature == 0 and self.agreement is None:
            raise ValueError("agreement: a greedy cell has a share of answers that are the plain server's (found None)")
        return self


class _Speculative(Form):
    accept_length: Length
    tokens_per_s: _Speed
    verify_rounds: _Count
    correct_drafts: _Count


class _Baseline(Form):
    tokens_per_s: _Speed


class _Domain(Form):
    domain: str
    accept_length: Length
    speedup: _Speed


class _Bucket(Form):
    tokens: str
    answers: _Count
    verify_rounds: _Count
    accept_length: Length


class _Settings(Form):
    model_config = ConfigDict(extra="allow")  # what else was asked is held against params.yaml, absent or not

    steps: int
    concurrency: list[int] = Field(min_length=1)
    temperatures: list[float] = Field(min_length=1)
    sets: list[str]
    prompts_sha256: str


class _Report(Form):
    """What is read of reports/benchmark.json."""

    complete: Literal[True] = True  # what says otherwise of itself is half a measurement
    speculative: _Speculative
    baseline: _Baseline
    speedup: float
    break_even_accept_length: float
    lossless: bool
    predicted_accept_length: Length | None
    survival: list[float] = Field(min_length=1)
    by_domain: list[_Domain] = Field(min_length=1)
    by_context: list[_Bucket] = Field(min_length=1)
    cells: list[_Cell]
    settings: _Settings

    @model_validator(mode="after")
    def _has_its_headline(self) -> "_Report":
        headline_cell(self.model_dump())
        return self


def read_report() -> dict[str, Any]:
    """reports/benchmark.json.

    Raises:
        DraftlineError: it is absent, damaged or of another version; names the field.
    """
    return read_form(REPORT, _Report, _DAMAGED).model_dump()


def headline_cells(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell a set: our draft's, greedy, at the lowest concurrency. Pooled they are the report's headline."""
    return [cell for cell in _lowest(report) if cell["set"] != POOLED]


def headline_cell(report: dict[str, Any]) -> dict[str, Any]:
    """The cell that the report's own figures repeat.

    Raises:
        ValueError: there is none.
    """
    cells = _lowest(report)
    pooled = [cell for cell in cells if cell["set"] == POOLED]
    if not cells or (len(cells) > 1 and not pooled):
        raise ValueError(f"cells: none of draft {OURS!r}, greedy, at {min(report['settings']['concurrency'])} at once")
    return (pooled or cells)[0]


def _lowest(report: dict[str, Any]) -> list[dict[str, Any]]:
    lowest = min(report["settings"]["concurrency"])
    key = (OURS, lowest, 0)
    return [cell for cell in report["cells"] if (cell["draft"], cell["concurrency"], cell["temperature"]) == key]


def read_answers(path: Path = PROMPTS) -> pd.DataFrame:
    """reports/benchmark_prompts.csv: a row an answer; NaN where a number that may be left out is.

    Raises:
        DraftlineError: it is absent or damaged; names line and column.
    """
    try:
        # Of text that looks like a number or like nothing pandas would make another id.
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).fillna("")
    except FileNotFoundError:
        raise DraftlineError(f"{path}: not there. {AGAIN}") from None
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:  # empty, not UTF-8, lines of several lengths
        raise DraftlineError(f"{path}: no CSV file ({' '.join(str(error).split())}). {_DAMAGED}") from None
    if absent := [name for name in (*_TEXTS, *_NUMBERS, *_OPTIONAL) if name not in frame]:
        raise DraftlineError(f"{path}: column {absent[0]} is missing. {_DAMAGED}")
    for name in _TEXTS:
        _refuse(path, frame[name], frame[name] == "", "a text")
    for name in (*_NUMBERS, *_OPTIONAL):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        no_number = numbers.isna() | numbers.abs().eq(float("inf"))
        _refuse(path, frame[name], no_number & ~((frame[name] == "") & (name in _OPTIONAL)), "a number")
        frame[name] = numbers
    return frame


def _refuse(path: Path, column: pd.Series, wrong: pd.Series, expected: str) -> None:
    if wrong.any():
        row = wrong.idxmax()
        raise DraftlineError(
            f"{path}:{row + 2}: column {column.name}: {expected} is expected, found {column[row][:40]!r}. {_DAMAGED}"
        )
