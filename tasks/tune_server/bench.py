"""What a search asks of that which measures: batches of candidates beside the plain server (measure.py holds the real one)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tasks.tune_server.candidates import Candidate
from tasks.tune_server.results import Result


@dataclass(frozen=True)
class MeasuredBatch:
    """What a batch brought.

    Attributes:
        failed: why a candidate's server did not start or did not last.
        started: servers, within `start_s` seconds.
        plain_answer_s: seconds that an answer of the plain server took; None where there was none.
        is_cut: whether the budget ended before all was asked; results are of whole repeats.
    """

    results: dict[Candidate, Result]
    failed: dict[Candidate, str] = field(default_factory=dict)
    started: int = 0
    start_s: float = 0.0
    plain_answer_s: float | None = None
    is_cut: bool = False


class Bench(Protocol):
    """What measures candidates beside the plain server.

    Attributes:
        capacity: servers at once, the plain one included; 1 where they run in turn.
        starts_together: whether several servers start in the time of one.
        least_questions: that tell anything.
        running: candidates whose servers are up.
    """

    capacity: int
    least_questions: int
    starts_together: bool
    running: Collection[Candidate]

    def remaining(self) -> float:
        """Seconds of the budget that are left."""

    def measure(
        self, batch: Sequence[Candidate], questions: int, rung: int, ranked: Sequence[Candidate]
    ) -> MeasuredBatch:
        """Ask the plain server and each of `batch`; of other servers that run, the last in `ranked` makes room first."""
