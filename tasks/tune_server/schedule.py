"""What fits into the budget of a search, by what starts and answers took so far; and how large a budget would have done."""

import math
from collections.abc import Collection, Sequence

from tasks.tune_server.bench import Bench, MeasuredBatch
from tasks.tune_server.candidates import PLAIN, Candidate
from tasks.tune_server.costs import Costs

# Of the questions of rung 0, so many times as many are asked at most.
MOST_TIMES = 16
# What starts and answers take varies: so many times as much as was measured does.
_RESERVE = 1.2


class Schedule:
    """
    Attributes:
        few: questions of rung 0, the fewest that tell anything.
        budget: seconds in all.
    """

    def __init__(self, bench: Bench):
        self.few, self.budget = bench.least_questions, bench.remaining()
        self._bench, self._costs = bench, Costs(bench.starts_together)

    @property
    def room(self) -> int:
        """Candidates of a batch."""
        return max(1, self._bench.capacity - 1)

    def learn(self, batch: Sequence[Candidate], measured: MeasuredBatch) -> None:
        """Note what a batch took."""
        if measured.is_cut and not self._costs.are_known and not measured.started:
            # At least: none but the plain server, which may have answered, was up by then.
            self._costs.started(1 + len(batch), self._spent)
            return
        self._costs.started(measured.started, measured.start_s)
        if measured.plain_answer_s is not None:
            self._costs.answered(PLAIN, measured.plain_answer_s)
        for candidate, result in measured.results.items():
            self._costs.answered(candidate, result.answer_s)

    def next_batch(
        self, pending: Sequence[Candidate], questions: int, share: float, then: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """The first, and others that fit beside it into memory and budget; of those, the ones that run come first.

        Args:
            share: of the budget, that may be spent by its end.
            then: what is to be asked as much after it.

        Returns:
            None of them where not even the first fits.
        """
        if not self._costs.are_known:  # what a start takes is not known: no more than one start's time is risked
            return list(pending[: self.room if self._bench.starts_together else 1])
        batch = self._ordered(pending, self._bench.running)[: self.room]
        sizes = range(len(batch), 0, -1)
        return next((batch[:size] for size in sizes if self.fits(batch[:size], questions, share, then)), [])

    def fits(
        self, candidates: Sequence[Candidate], questions: int, share: float, then: Sequence[Candidate] = ()
    ) -> bool:
        """Whether so many questions of all of them end before so much of the budget is spent, and leave time for `then`."""
        needed = self._seconds(candidates, questions, self._bench.running)
        after = _RESERVE * self._seconds(then, questions, self._staying(candidates)) if then else 0.0
        return needed <= self._bench.remaining() - max(after, (1 - share) * self.budget)

    def affordable(self, candidates: Sequence[Candidate]) -> int:
        """The most questions that there is time to ask of all of them, and a reserve; 0 where not even the least."""
        left, running = self._bench.remaining() / _RESERVE, self._bench.running
        asked = (times * self.few for times in (MOST_TIMES, 8, 4, 2, 1))
        return next((questions for questions in asked if self._seconds(candidates, questions, running) <= left), 0)

    def shortage(self, missing: Sequence[Candidate], compared: Sequence[Candidate]) -> str:
        """A sentence on servers that there was no time for, and on how much would have been needed.

        Args:
            missing: in the first rung.
            compared: all that the last rung would ask once more.
        """
        running = self._bench.running if self._costs.are_known else ()
        needed = self._seconds(missing, self.few, running)
        needed += self._seconds(compared, self.few, self._staying(compared))
        minutes = math.ceil(max(_RESERVE * (self._spent + needed), self.budget + 1) / 60)
        if self._costs.are_known:
            why = f"{self._costs.told}; --minutes {minutes} would do."
        else:
            why = f"within {self._spent:.0f} s no server with the draft was up and warm; at least --minutes {minutes} is needed."
        names = ", ".join(candidate.name for candidate in missing)
        return f"{self.budget / 60:.3g} minutes are too short to measure {names}: {why}"

    @property
    def _spent(self) -> float:
        return self.budget - self._bench.remaining()

    def _staying(self, asked: Sequence[Candidate]) -> Collection[Candidate]:
        """What surely runs when they were asked."""
        together = {PLAIN, *self._bench.running, *asked}
        if len(together) <= self._bench.capacity:
            return together
        return {PLAIN, *asked} if len(asked) <= self.room < self._bench.capacity else ()

    def _seconds(self, candidates: Sequence[Candidate], questions: int, running: Collection[Candidate]) -> float:
        """Of as many batches as they take; for each after the first, what runs but the plain server makes room."""
        ordered, seconds = self._ordered(candidates, running), 0.0
        for number in range(0, len(ordered), self.room):
            asked = [PLAIN, *ordered[number : number + self.room]]
            seconds += self._costs.batch(sum(one not in running for one in asked), asked, questions)
            running = {PLAIN} if self._bench.capacity > 1 else ()
        return seconds

    def _ordered(self, pending: Sequence[Candidate], running: Collection[Candidate]) -> list[Candidate]:
        """The first, then those that run, then the rest."""
        first, *others = pending
        return [first, *sorted(others, key=lambda candidate: candidate not in running)]
