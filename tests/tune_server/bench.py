"""A bench without servers: speeds come of a given law, and time passes as a clock of its own says."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev

from tasks.tune_server.bench import MeasuredBatch
from tasks.tune_server.candidates import PLAIN, Candidate, Shape
from tasks.tune_server.costs import REPEATS
from tasks.tune_server.results import Result

PLAIN_STEP_S, ANSWER_TOKENS = 0.001, 100


def survival(shape: Shape, ratio: float = 0.7) -> tuple[float, ...]:
    """Each further token survives with one chance, a better one in a tree."""
    chance = ratio if shape.topk == 1 else min(0.95, ratio * (1 + 0.02 * (shape.draft_tokens - shape.steps)))
    return tuple(chance**position for position in range(1, shape.steps + 1))


def round_s(shape: Shape) -> float:
    return 0.0015 + 0.0002 * shape.steps + 0.0001 * (shape.topk > 1)


class Bench:
    """
    Attributes:
        clock: seconds that passed.
        asked: rung, questions and candidates of each batch.
    """

    def __init__(
        self,
        budget_s: float = 1000.0,
        capacity: int = 4,
        starts_together: bool = True,
        start_s: float = 20.0,
        broken: Callable[[Candidate], bool] = lambda candidate: False,
        effect: dict[str, float] | None = None,
        ratio: float = 0.7,
        cut_after: int | None = None,
    ):
        self.capacity, self.starts_together = capacity, starts_together
        self.least_questions = 4
        self.running: set[Candidate] = set()
        self.clock, self.asked = 0.0, []
        self._budget, self._start_s, self._broken = budget_s, start_s, broken
        self._effect, self._ratio, self._cut_after = effect or {}, ratio, cut_after

    def remaining(self) -> float:
        return self._budget - self.clock

    def measure(
        self, batch: Sequence[Candidate], questions: int, rung: int, ranked: Sequence[Candidate]
    ) -> MeasuredBatch:
        self.asked.append((rung, questions, tuple(batch)))
        if self.capacity == 1:
            self.running = set()
        assert self.capacity == 1 or len(batch) < self.capacity
        starting = [c for c in (PLAIN, *batch) if c not in self.running]
        seconds = self._start_s * (1 if self.starts_together else len(starting)) * bool(starting)
        self.clock += seconds
        failed = {c: "refused" for c in batch if self._broken(c)}
        alive = [c for c in batch if c not in failed]
        for candidate in (PLAIN, *alive):
            self.clock += REPEATS * questions * self._answer_s(candidate)
        kept = [c for c in (*ranked, *self.running) if c not in batch and c in self.running and c != PLAIN]
        self.running = {PLAIN, *alive, *kept[: self.capacity - 1 - len(alive)]} if self.capacity > 1 else set()
        results = {c: self._result(c, questions, rung) for c in alive}
        is_cut = self._cut_after is not None and len(self.asked) >= self._cut_after
        return MeasuredBatch(results, failed, len(starting), seconds, self._answer_s(PLAIN), is_cut)

    def _answer_s(self, candidate: Candidate) -> float:
        return ANSWER_TOKENS * PLAIN_STEP_S / self.speedup(candidate)

    def speedup(self, candidate: Candidate) -> float:
        """The law."""
        gain = 1.0
        for option in candidate.options:
            gain *= self._effect.get(option.name, 1.0)
        if candidate.shape is None:
            return gain
        return gain * (1 + sum(survival(candidate.shape, self._ratio))) * PLAIN_STEP_S / round_s(candidate.shape)

    def _result(self, candidate: Candidate, questions: int, rung: int) -> Result:
        speed, shape = self.speedup(candidate), candidate.shape
        survived = survival(shape, self._ratio) if shape else ()
        return Result(
            rung,
            questions,
            (speed * 0.99, speed, speed * 1.01),
            speed / PLAIN_STEP_S,
            1 / PLAIN_STEP_S,
            1 + sum(survived) if shape else None,
            survived,
            0.0,
            (1 + sum(survived)) / speed if shape else None,
            PLAIN_STEP_S,
            self._answer_s(candidate),
        )


class Noisy(Bench):
    """Repeats vary by a normal law of 1.5 %."""

    def __init__(self, seed: int, budget_s: float = 3000, capacity: int = 8, cut_in: int | None = None, **law):
        """
        Args:
            cut_in: the rung in which the budget ends after one repeat.
        """
        super().__init__(budget_s, capacity, **law)
        self._random, self._cut_in = random.Random(seed), cut_in

    def measure(self, batch, questions, rung, ranked):
        found = super().measure(batch, questions, rung, ranked)
        if rung != self._cut_in:
            return found
        cut = {c: replace(result, ratios=result.ratios[:1]) for c, result in found.results.items()}
        return replace(found, results=cut, is_cut=True)

    def _result(self, candidate, questions, rung):
        found, speed = super()._result(candidate, questions, rung), self.speedup(candidate)
        return replace(found, ratios=tuple(speed * self._random.gauss(1, 0.015) for _ in range(3)))


class Questions(Bench):
    """Each question has a chance of its own that a token survives; the first few of them are not like all."""

    def __init__(self, seed: int):
        super().__init__(3000)
        draws = random.Random(seed)
        self._ratios = [min(0.95, max(0.02, draws.gauss(0.4, 0.2))) for _ in range(300)]

    def _survivals(self, shape: Shape, questions: int) -> list[tuple[float, ...]]:
        return [survival(shape, ratio) for ratio in self._ratios[:questions]]

    def speedup(self, candidate: Candidate) -> float:
        return self._over(candidate, len(self._ratios))

    @cache  # noqa: B019
    def _over(self, candidate: Candidate, questions: int) -> float:
        if candidate.shape is None:
            return 1.0
        survived = self._survivals(candidate.shape, questions)
        return (1 + fmean(map(sum, survived))) * PLAIN_STEP_S / round_s(candidate.shape)

    def _result(self, candidate, questions, rung):
        survived, speed = self._survivals(candidate.shape, questions), self._over(candidate, questions)
        lengths = [1 + sum(of_question) for of_question in survived]
        return replace(
            super()._result(candidate, questions, rung),
            ratios=(speed * 0.99, speed, speed * 1.01),
            accept_length=fmean(lengths),
            survival=tuple(map(fmean, zip(*survived, strict=True))),
            accept_error=stdev(lengths) / math.sqrt(len(lengths)) / fmean(lengths),
            break_even=round_s(candidate.shape) / PLAIN_STEP_S,
        )
