"""From passes of a plain server and of one with a draft over the same questions to figures."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, stdev

from tasks.common.acceptance import Acceptance, pool
from tasks.common.benchmark_names import POOLED
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Load, Pass, Question, percentile, speed, step_seconds

_RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """One question, asked of both servers."""

    question: Question
    repeat: int
    baseline: Completion
    speculative: Completion

    @property
    def first_difference(self) -> int | None:
        """Position of the first token in which the answers part; None if they are the same."""
        plain, drafted = self.baseline.output_ids, self.speculative.output_ids
        if plain == drafted:
            return None
        same = (a == b for a, b in zip(plain, drafted, strict=False))
        return next((position for position, equal in enumerate(same) if not equal), min(len(plain), len(drafted)))


@dataclass(frozen=True)
class Comparison:
    """Passes of one draft and the plain server's over the same loads and repeats.

    Attributes:
        name: of the set; 'all' where several are pooled.
        baseline: in the order of `drafted`.
    """

    draft: str
    name: str
    baseline: tuple[Pass, ...]
    drafted: tuple[Pass, ...]

    @property
    def load(self) -> Load:
        """How it was asked; of several sets, the first."""
        return self.drafted[0].load

    @cached_property
    def pairs(self) -> list[Pair]:
        return [
            Pair(question, drafted.repeat, *answers)
            for plain, drafted in zip(self.baseline, self.drafted, strict=True)
            for question, *answers in zip(drafted.load.questions, plain.answers, drafted.answers, strict=True)
        ]

    @cached_property
    def acceptance(self) -> Acceptance:
        return pool(answer for one in self.drafted for answer in one.answers)

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second over all passes, prefill included."""
        return speed(self.drafted) / speed(self.baseline)

    @cached_property
    def speedup_interval(self) -> tuple[float, float]:
        """95 % interval, the wider of two: by bootstrap over questions, and by Student's t over the ratios of the passes.

        Either alone is too narrow somewhere: one question has nothing to draw from, and a pass in which one server alone was slow
        no question shows.
        """
        of_waiting = pair_speedup(self.pairs)  # of one request at a time the speed-up itself
        over_questions = [self.speedup * bound / of_waiting for bound in bootstrap(self.pairs)]
        over_passes = student(
            [drafted / plain for drafted, plain in zip(speeds(self.drafted), speeds(self.baseline), strict=True)]
        )
        low, high = max(over_questions, over_passes, key=lambda bounds: bounds[1] / bounds[0])
        return low, high

    @property
    def break_even(self) -> float:
        """The acceptance length at which speculation costs as much as it saves: time of a round over time of a plain token."""
        round_s, plain_s = step_seconds(self.drafted, self.baseline)
        return round_s / plain_s

    @property
    def agreement(self) -> float:
        """Share of answers that are the plain server's token by token."""
        return fmean(pair.first_difference is None for pair in self.pairs)

    @property
    def agreed_tokens(self) -> float:
        """Share of the plain server's tokens that stand before the first difference."""
        agreed = sum(
            len(pair.baseline.output_ids) if pair.first_difference is None else pair.first_difference
            for pair in self.pairs
        )
        return agreed / sum(len(pair.baseline.output_ids) for pair in self.pairs)


def compare(passes: Sequence[Pass], drafts: Sequence[str], baseline: str) -> Iterator[Comparison]:
    """Every draft at every load of which both servers have made all the passes that there are; several sets also pooled."""
    made = {(one.arm, one.load.key, one.repeat): one for one in passes}
    loads = {one.load.key: one.load for one in passes}.values()
    repeats = sorted({one.repeat for one in passes})
    for draft in drafts:
        found: dict[tuple[float, int], list[Comparison]] = {}
        for load in loads:
            both = [(made.get((baseline, load.key, n)), made.get((draft, load.key, n))) for n in repeats]
            both = [(plain, with_draft) for plain, with_draft in both if plain and with_draft]
            if both:
                plain, with_draft = zip(*both, strict=True)
                one = Comparison(draft, load.name, plain, with_draft)
                found.setdefault((load.temperature, load.concurrency), []).append(one)
        for of_sets in found.values():
            yield from of_sets
            if len(of_sets) > 1:
                yield pooled(of_sets)


def pooled(comparisons: Sequence[Comparison]) -> Comparison:
    """Several sets as one."""
    baseline = tuple(one for of_set in comparisons for one in of_set.baseline)
    return Comparison(
        comparisons[0].draft, POOLED, baseline, tuple(one for of_set in comparisons for one in of_set.drafted)
    )


def speeds(passes: Sequence[Pass]) -> list[float]:
    """Tokens per second of all users together in each repeat."""
    return [speed(one for one in passes if one.repeat == repeat) for repeat in sorted({one.repeat for one in passes})]


def bootstrap(pairs: Sequence[Pair]) -> tuple[float, float]:
    """95 % interval of the speed-up over questions: all repeats of a question are drawn together."""
    import numpy as np

    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.question.id, []).append(pair)
    totals = np.array(
        [[*_tokens_and_wait(of, "speculative"), *_tokens_and_wait(of, "baseline")] for of in groups.values()]
    )
    draws = np.random.default_rng(0).integers(len(totals), size=(_RESAMPLES, len(totals)))
    tokens, seconds, plain_tokens, plain_seconds = totals[draws].sum(axis=1).T
    found = np.sort(tokens / seconds / (plain_tokens / plain_seconds)).tolist()
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]


def student(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean ratio of a few passes, at least two, over their logarithms."""
    from scipy.stats import t

    logarithms = [math.log(ratio) for ratio in ratios]
    half = t.ppf(0.975, len(ratios) - 1) * stdev(logarithms) / math.sqrt(len(ratios))
    return math.exp(fmean(logarithms) - half), math.exp(fmean(logarithms) + half)


def pair_speed(pairs: Iterable[Pair], arm: str) -> float:
    """Tokens per second of waiting for these answers."""
    tokens, seconds = _tokens_and_wait(pairs, arm)
    return tokens / seconds


def pair_speedup(pairs: Sequence[Pair]) -> float:
    return pair_speed(pairs, "speculative") / pair_speed(pairs, "baseline")


def _tokens_and_wait(pairs: Iterable[Pair], arm: str) -> tuple[int, float]:
    """(tokens, seconds) of a server's answers."""
    answers = [getattr(pair, arm) for pair in pairs]
    return sum(len(answer.output_ids) for answer in answers), sum(answer.seconds for answer in answers)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def latency_ms(passes: Sequence[Pass], of: Callable[[Pass], list[float]]) -> dict[str, float | None]:
    """Median and 99th percentile over all streamed answers, None where nothing was streamed."""
    values = [1e3 * value for one in passes for value in of(one)]
    return {f"p{percent}": round(percentile(values, percent), 3) if values else None for percent in (50, 99)}


def stream_speed(passes: Sequence[Pass]) -> float | None:
    """Median tokens per second that one reader sees, from the first piece to the last."""
    seen = [
        (answer.pieces[-1][1] - answer.pieces[0][1]) / (answer.pieces[-1][0] - answer.pieces[0][0])
        for one in passes
        for answer in one.answers
        if len(answer.pieces) > 1
    ]
    return round(median(seen), 2) if seen else None
