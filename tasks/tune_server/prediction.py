"""How fast a candidate can be at best that was never started, from those that were measured.

Acceptance: a chain's survival holds for every fewer steps, and is prolonged by its last ratio. A tree is bounded by a
measured one of the same top-k with at least as many draft tokens and at most as many steps, whose nodes hold all of its
own; else by all its steps being right. Time, in plain steps of the server beside it, which a slow minute makes longer as
well: a line through the rounds of the measured chains; a tree's round is taken to be no shorter than a chain's of as many
steps. What such a bound rules out need not be started.
"""

from collections.abc import Iterable

from tasks.common.break_even import RoundTime, accept_length_at, predicted_speedup, prolonged
from tasks.tune_server.candidates import Candidate, Shape
from tasks.tune_server.results import Result, Trial

# A bound must stay behind the best by this share, and by what the repeats of those that it rests on vary.
_MARGIN = 0.05


class Prediction:
    """Made of the latest results of all candidates without options.

    Attributes:
        measured: these results.
        round_time: of a chain, in plain steps; None while two lengths were not measured.
    """

    def __init__(self, trials: Iterable[Trial]):
        measured = {
            t.candidate.shape: t.last for t in trials if t.last and t.candidate.shape and not t.candidate.options
        }
        self.measured: dict[Shape, Result] = measured
        self._chains = {shape.steps: result for shape, result in measured.items() if shape.topk == 1}
        self.round_time = RoundTime.through({steps: result.break_even for steps, result in self._chains.items()})

    def speedup(self, shape: Shape) -> float | None:
        """Decoding speed over the plain server's at best; None while two lengths of chains were not measured."""
        if self.round_time is None:
            return None
        return predicted_speedup(self.accept_length(shape), self.round_steps(shape), 1.0)

    def round_steps(self, shape: Shape) -> float:
        """Plain steps that a round takes at least; it holds a forward of the target, as a plain step does."""
        return max(1.0, self.round_time.at(shape.steps))

    def accept_length(self, shape: Shape) -> float:
        """At best."""
        if shape.topk == 1:
            longest = self._chains[max(self._chains)].survival
            return accept_length_at(prolonged(longest, shape.steps), shape.steps)
        bounds = [
            accept_length_at(prolonged(result.survival[: known.steps], shape.steps), shape.steps)
            for known, result in self.measured.items()
            if known.topk == shape.topk and known.draft_tokens >= shape.draft_tokens and known.steps <= shape.steps
        ]
        return min([shape.steps + 1, *bounds])

    def likely(self, candidate: Candidate) -> float:
        """What to start first: as `speedup`, but a tree as if it kept the survival of the measured one nearest to it."""
        shape = candidate.shape
        trees = [known for known in self.measured if known.topk > 1]
        if self.round_time is None or shape.topk == 1 or not trees:
            return self.speedup(shape) or 0.0
        nearest = min(trees, key=lambda known: (abs(known.topk - shape.topk), abs(known.steps - shape.steps), known))
        result = self.measured[nearest]
        dearer = result.break_even / self.round_steps(nearest)
        reached = accept_length_at(prolonged(result.survival[: nearest.steps], shape.steps), shape.steps)
        return predicted_speedup(reached, self.round_steps(shape) * dearer, 1.0)

    def ruled_out(self, candidate: Candidate) -> str | None:
        """Why it cannot be the best; None where it may be."""
        if not self.measured or (bound := self.speedup(candidate.shape)) is None:
            return None
        best, result = max(self.measured.items(), key=lambda one: one[1].decoding_speedup)
        margin = max(_MARGIN, *(one.uncertainty for one in (result, *self._chains.values())))
        if bound >= result.decoding_speedup * (1 - margin):
            return None
        return (
            f"at best {bound:.2f} times the plain server in decoding (acceptance length {self.accept_length(candidate.shape):.2f} at "
            f"best, {self.round_steps(candidate.shape):.2f} plain steps a round), and {best} was measured at "
            f"{result.decoding_speedup:.2f}"
        )
