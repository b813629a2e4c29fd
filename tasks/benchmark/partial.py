"""What a benchmark has measured so far, kept on disk and marked as incomplete until its report is written."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tasks.common.errors import DraftlineError, in_a_line
from tasks.common.files import REPORTS, remove, write_json
from tasks.common.params import Params
from tasks.common.traffic import Pass

REPORT, PARTIAL = REPORTS / "benchmark.json", REPORTS / "benchmark.partial.json"
_KILLED = "it still runs, or was killed without a word"


class Partial:
    """Writes a row a pass after every load, servers apart; says why where the benchmark ends early.

    Args:
        earlier: what an earlier benchmark left.
    """

    def __init__(self, params: Params, path: Path = PARTIAL, earlier: Sequence[Path] = (REPORT,)):
        self._repeats, self._path, self._earlier = params.benchmark.repeats, path, earlier
        self._rows: list[dict] = []

    def __enter__(self) -> "Partial":
        return self

    def begin(self) -> None:
        """From here on it is measured: no gate is to pass on an earlier report if this benchmark dies, and no page to differ
        from the report beside it.

        Not before: a start that fails has measured nothing, and what there was is what there is.
        """
        for path in (self._path, *self._earlier):
            remove(path)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            remove(self._path)
        elif self._rows:
            with suppress(DraftlineError):  # on a full disk what was kept before stays
                self._write(in_a_line(error))
            error.add_note(f"What was measured is kept in {self._path}, marked as incomplete.")

    def keep(self, passes: Sequence[Pass]) -> None:
        self._rows += [_row(one) for one in passes]
        self._write(_KILLED)

    def _write(self, why: str) -> None:
        write_json(self._path, {"complete": False, "why": why, "repeats": self._repeats, "passes": self._rows})


def _row(one: Pass) -> dict:
    """Counts and times as they are: a figure is made of all passes or not at all."""
    return {
        "arm": one.arm,
        "set": one.load.name,
        "concurrency": one.load.concurrency,
        "temperature": one.load.temperature,
        "repeat": one.repeat,
        "requests": len(one.answers),
        "tokens": one.tokens,
        "seconds": round(one.seconds, 3),
        "tokens_per_s": round(one.tokens_per_s, 2),
        "verify_rounds": sum(answer.verify_rounds for answer in one.answers),
        "correct_drafts": sum(answer.correct_drafts for answer in one.answers),
    }
