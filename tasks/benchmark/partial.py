"""What a benchmark has measured so far, kept on disk and marked as incomplete until the whole is there."""

from collections.abc import Sequence
from pathlib import Path

from tasks.benchmark.arms import Arm
from tasks.benchmark.rows import cell
from tasks.benchmark.summary import compared
from tasks.common.files import REPORTS, write_json
from tasks.common.params import Params
from tasks.common.traffic import Pass

PARTIAL = REPORTS / "benchmark.partial.json"
_KILLED = "it still runs, or was killed without a word"


class Partial:
    """Writes the cells measured so far after every load; says why where the benchmark ends early."""

    def __init__(self, arms: Sequence[Arm], params: Params, path: Path = PARTIAL):
        self._arms, self._params, self._path = arms, params, path
        self._passes: list[Pass] = []

    def __enter__(self) -> "Partial":
        self.remove()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error and self._passes:
            self._write(str(error) or type(error).__name__)

    def keep(self, passes: Sequence[Pass]) -> None:
        self._passes = list(passes)
        self._write(_KILLED)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self, why: str) -> None:
        cells = [cell(one, self._params.serve.num_steps) for one in compared(self._passes, self._arms)]
        write_json(
            self._path, {"complete": False, "why": why, "repeats": self._params.benchmark.repeats, "cells": cells}
        )
