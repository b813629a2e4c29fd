"""Successive halving: few questions for many candidates, then more for those that were faster, until the budget is spent.

    rung 0    the servers to compare with, two lengths of chains and trees that start beside them at no cost; then shapes
              that the model does not rule out
    rung 1    the best third (two at least), and the best with each open setting
    rung 2..  the better half, and the best with all settings that helped; twice the questions
    last      the two best beside the servers to compare with, and the plain server under the best one's settings

Nothing here starts a server: what measures is handed in (bench.py).
"""

import math
from collections.abc import Callable, Sequence

from tasks.common.errors import in_a_line
from tasks.tune_server.bench import Bench
from tasks.tune_server.candidates import Candidate
from tasks.tune_server.prediction import Prediction
from tasks.tune_server.ranking import bare_of, helps, ranked
from tasks.tune_server.results import Trial
from tasks.tune_server.schedule import MOST_TIMES, Schedule
from tasks.tune_server.space import CURRENT, Space

# Of the budget, what the rungs up to this one may use; the rest is for those that come.
_SHAPES_SHARE, _OPTIONS_SHARE, _HALVING_SHARE = 0.5, 0.75, 0.85


class _Spent(Exception):
    """The budget ended."""


class Search:
    """
    Attributes:
        trials: what is known of each candidate that was considered, in the order of their starts.
        best: of those that params.yaml would take (ranking.py); None where none was measured.
        ended: a sentence on how the search came to its end.
        is_complete: whether it ran until its budget or its questions ended.
        shortage: a sentence on the first servers that there was no time for, and on how much would do; empty where there was.
    """

    def __init__(self, space: Space, bench: Bench, say: Callable[[str], object] = lambda sentence: None):
        self.space = space
        self.trials: dict[Candidate, Trial] = {}
        self.ended, self.is_complete, self.shortage = "", False, ""
        self._bench, self._say = bench, say
        self._schedule = Schedule(bench)
        self._few, self._rung = bench.least_questions, -1

    def run(self) -> None:
        """Search until the budget is spent or nothing is left to be told apart.

        Raises:
            DraftlineError: the bench's, where nothing can be measured any more; `ended` says why, and results stay.
        """
        try:
            self._try_shapes()
            if self.has_compared:  # else there is no time for more than was measured
                self._try_options()
                self._halve()
                self._compare()
            self.ended = f"Done with {self._bench.remaining():.0f} s of the budget left."
        except _Spent:
            self.ended = f"The budget ended in rung {self._rung}: what was asked by then counts."
        except BaseException as error:  # a signal as well
            self.ended = f"Ended early, in rung {max(0, self._rung)}: {in_a_line(error)}"
            raise
        self.is_complete, self.shortage = True, self._shortage()

    @property
    def best(self) -> Trial | None:
        """None that was beside it is clearly faster, but where three beat each other in a circle (ranking.py)."""
        candidates = self._ranked()
        return self.trials[candidates[0]] if candidates else None

    @property
    def in_order(self) -> list[Trial]:
        """Those that may be chosen, the best first; then the others, as they were considered."""
        return [self.trials[candidate] for candidate in dict.fromkeys([*self._ranked(), *self.trials])]

    @property
    def has_compared(self) -> bool:
        """Whether there is a best, and more that may be chosen was measured than the current parameters, alone the best of nothing."""
        measured = {c for c, trial in self.trials.items() if trial.last and self._may_be_chosen(c)}
        return self.best is not None and bool(measured - {self.space.rows[CURRENT]})

    @property
    def prediction(self) -> Prediction:
        """As far as measurements go by now."""
        return Prediction(self.trials.values())

    # --- rungs

    def _try_shapes(self) -> None:
        first = self._first()
        if self._bench.starts_together:  # the room that is left costs questions, and no further start
            trees = [c for c in self.space.shapes if c.shape.topk > 1]  # what they reach, no chain tells
            first += trees[: max(0, self._schedule.room - len(first))]
        self._measure_all(first, self._few, 1.0)
        pending = [candidate for candidate in self.space.shapes if candidate not in first]
        while pending := self._not_ruled_out(pending):
            batch = self._schedule.next_batch(pending, self._few, _SHAPES_SHARE)
            if not batch:
                break
            self._measure(batch, self._few)
            pending = [candidate for candidate in pending if candidate not in batch]

    def _first(self) -> list[Candidate]:
        """What to compare with, and the longest chain: of two lengths the time of a step is known."""
        return [*self.space.required, *[c for c in self.space.shapes if c.shape.topk == 1][:1]]

    def _not_ruled_out(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those worth a start, the most promising first; notes why the others are not."""
        prediction, worth = self.prediction, []
        for candidate in candidates:
            if reason := prediction.ruled_out(candidate):
                self._trial(candidate).pruned = reason
            else:
                worth.append(candidate)
        return sorted(worth, key=prediction.likely, reverse=True)

    def _try_options(self) -> None:
        candidates = self._ranked()
        kept, shape = candidates[: max(2, math.ceil(len(candidates) / 3))], candidates[0].shape
        open_options = [o for o in self.space.options if shape.topk == 1 or not o.chains_only]
        self._measure_all(
            [*kept, *(Candidate(shape, (option,)) for option in open_options)],
            2 * self._few,
            _OPTIONS_SHARE,
            self._compared(),
        )

    def _halve(self) -> None:
        questions, together = 4 * self._few, self._helpful_together()
        while True:
            kept = self._ranked()[: math.ceil(self._count_of_latest_rung() / 2)]
            field = self._with_bare([*kept, *together])
            if len(field) <= 2 or questions > MOST_TIMES * self._few:
                return
            limits = questions, _HALVING_SHARE, self._compared()
            if not self._schedule.fits(field, *limits):
                return
            self._measure_all(field, *limits)
            questions, together = 2 * questions, []

    def _helpful_together(self) -> list[Candidate]:
        """The best shape with the best setting of each kind that beats it without; none where that is one setting."""
        helped: dict[str, Candidate] = {}
        for candidate in self._ranked():
            if candidate.options and helps(self.trials[candidate], self._bare(candidate)):
                helped.setdefault(candidate.options[0].group, candidate)
        if len(helped) < 2:
            return []
        options = tuple(candidate.options[0] for candidate in helped.values())
        return [Candidate(next(iter(helped.values())).shape, options)]

    def _compare(self) -> None:
        """The best with all that it is to be compared with, in one rung, asked as much as the rest of the budget allows."""
        if not self._ranked():
            return
        compared = self._compared()
        questions = self._schedule.affordable(compared)
        if questions >= self._most_asked:
            self._measure_all(compared, questions, 1.0)
        # What is left of the budget goes to the best and those that run.
        while candidates := self._ranked():
            best, *others = candidates
            beside, running = [c for c in compared if c != best], self._bench.running
            again = [c for c in beside if c in running] or [c for c in others if c in running]
            questions = self._schedule.affordable([best, *again])
            if not again or questions <= self._most_asked:
                return
            self._measure_all([best, *again], questions, 1.0)

    def _compared(self) -> list[Candidate]:
        """The best so far, and what the last rung would measure beside it."""
        best, *others = self._ranked()
        alike = [Candidate(None, best.options)] if best.options else []
        rows = sorted(self.space.required, key=lambda row: others.index(row) if row in others else len(others))
        compared = dict.fromkeys([*self._with_bare([best]), *rows, *alike, *others[:1]])
        return [c for c in compared if c not in self.trials or not self.trials[c].failed]

    # --- measuring

    def _measure_all(
        self, wanted: Sequence[Candidate], questions: int, share: float, then: Sequence[Candidate] = ()
    ) -> None:
        """A rung, in batches, as many as fit into the budget; where not two candidates do, there is nothing to compare."""
        pending, is_new, limits = list(dict.fromkeys(wanted)), 1, (questions, share, then)
        while pending and (batch := self._schedule.next_batch(pending, *limits)):
            if is_new and len(batch) < 2 and not (pending[1:] and self._schedule.fits(pending[:2], *limits)):
                return
            self._rung += is_new
            self._measure(batch, questions)
            pending, is_new = [candidate for candidate in pending if candidate not in batch], 0

    def _measure(self, batch: Sequence[Candidate], questions: int) -> None:
        names = ", ".join(candidate.name for candidate in batch)
        self._say(f"rung {self._rung}, {questions} questions: {names} ({self._bench.remaining():.0f} s left)")
        measured = self._bench.measure(batch, questions, self._rung, self._ranked())
        self._schedule.learn(batch, measured)
        for candidate in batch:
            trial = self._trial(candidate)
            if result := measured.results.get(candidate):
                trial.results.append(result)
            trial.failed = measured.failed.get(candidate)
            if trial.failed:
                self._say(f"dropped: {candidate.name}: {trial.failed}")
        if measured.is_cut:
            raise _Spent

    def _shortage(self) -> str:
        known = {candidate for candidate, trial in self.trials.items() if trial.last or trial.failed}
        missing = [candidate for candidate in self._first() if candidate not in known]
        return self._schedule.shortage(missing, self.space.required) if missing else ""

    # --- order

    def _trial(self, candidate: Candidate) -> Trial:
        return self.trials.setdefault(candidate, Trial(candidate))

    def _ranked(self) -> list[Candidate]:
        """Candidates that may be chosen, the best first."""
        trials = [t for t in self.trials.values() if t.last and not t.failed and self._may_be_chosen(t.candidate)]
        return [trial.candidate for trial in ranked(trials, self.trials.values())]

    def _bare(self, candidate: Candidate) -> Trial | None:
        return bare_of(candidate, self.trials.values())

    def _with_bare(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """And the same numbers without settings, by which the settings are judged; not one whose server failed."""
        bare = [self._bare(candidate) for candidate in candidates if candidate.options]
        return list(dict.fromkeys([*candidates, *(trial.candidate for trial in bare if trial and not trial.failed)]))

    def _count_of_latest_rung(self) -> int:
        rungs = [self.trials[candidate].last.rung for candidate in self._ranked()]
        return rungs.count(max(rungs, default=-1))

    @property
    def _most_asked(self) -> int:
        """Questions of a rung so far. The last rung decides, and asks no fewer."""
        return max((result.questions for trial in self.trials.values() for result in trial.results), default=0)

    def _may_be_chosen(self, candidate: Candidate) -> bool:
        return candidate.shape is not None and candidate not in self.space.unfit
