"""What a batch of measurements will take, from those that were made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tasks.tune_server.candidates import Candidate

REPEATS = 3


@dataclass
class Costs:
    """
    Attributes:
        starts_together: whether servers start at the same time, or one after the other.
    """

    starts_together: bool
    _starts: list[tuple[int, float]] = field(default_factory=list)
    _answers: dict[Candidate, float] = field(default_factory=dict)

    def started(self, servers: int, seconds: float) -> None:
        """So many were started, in so long, warm-up included."""
        if servers:
            self._starts.append((servers, seconds))

    def answered(self, candidate: Candidate, seconds: float) -> None:
        """An answer took so long, of all users together."""
        self._answers[candidate] = seconds

    @property
    def are_known(self) -> bool:
        """Whether anything was started and asked."""
        return bool(self._starts and self._answers)

    @property
    def told(self) -> str:
        """In words, once they are known."""
        servers, seconds = self._starts[-1]
        started = f"{servers} server{'s' * (servers > 1)} took {seconds:.0f} s to start"
        return f"{started}, and an answer took {max(self._answers.values()):.2g} s"

    def batch(self, starting: int, asked: Sequence[Candidate], questions: int) -> float:
        """Seconds to start so many servers and to ask each of `asked` so many questions, `REPEATS` times."""
        # Of one that was not asked yet: as slow as the slowest.
        slowest = max(self._answers.values(), default=0.0)
        an_answer_each = sum(self._answers.get(candidate, slowest) for candidate in asked)
        return self._start(starting) + REPEATS * questions * an_answer_each

    def _start(self, servers: int) -> float:
        """Fewer that start together take as long as more did; more take longer in proportion."""
        if not servers or not self._starts:
            return 0.0
        if not self.starts_together:
            # The first on a fresh host reads all from disk and compiles: what it took says nothing of those that follow.
            lately = self._starts[1:] or self._starts
            return servers * median(seconds / count for count, seconds in lately)
        return min(seconds * max(1.0, servers / count) for count, seconds in self._starts)
