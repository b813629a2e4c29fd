"""What was found about each candidate."""

import math
from dataclasses import dataclass, field
from statistics import median

from tasks.common.break_even import predicted_speedup
from tasks.tune_server.candidates import Candidate
from tasks.tune_server.costs import REPEATS


@dataclass(frozen=True)
class Result:
    """A candidate in one rung, beside the plain server.

    Attributes:
        ratios: of its tokens per second to the plain server's, one a repeat.
        tokens_per_s: of all users together, over all repeats; so is `plain_tokens_per_s`.
        accept_length: None for a server without a draft, and so the next two.
        survival: share of rounds in which draft tokens 1..i are all correct.
        accept_error: standard error of the acceptance length between questions, as a share of it; infinite for one question.
        break_even: time of a round over that of a plain step beside it, behind the first token; median over the repeats.
        plain_step_s: seconds that one user waits for a token of the plain server, behind the first.
        answer_s: seconds that an answer took, of all users together.
    """

    rung: int
    questions: int
    ratios: tuple[float, ...]
    tokens_per_s: float
    plain_tokens_per_s: float
    accept_length: float | None
    survival: tuple[float, ...]
    accept_error: float
    break_even: float | None
    plain_step_s: float
    answer_s: float

    @property
    def is_whole(self) -> bool:
        """Whether all repeats were asked; of fewer, which a budget that ends leaves, the spread says nothing."""
        return len(self.ratios) >= REPEATS

    @property
    def speedup(self) -> float:
        """Median over the repeats."""
        return median(self.ratios)

    @property
    def decoding_speedup(self) -> float:
        """Without the prefill, as the model predicts it."""
        return predicted_speedup(self.accept_length, self.break_even, 1.0)

    @property
    def uncertainty(self) -> float:
        """As a share of the speed-up: half the spread of the repeats, and the error of the acceptance length, which no
        repeat shows, since all ask the same questions."""
        return math.hypot((max(self.ratios) - min(self.ratios)) / 2 / self.speedup, self.accept_error)


@dataclass
class Trial:
    """All that is known of one candidate.

    Attributes:
        results: one a rung.
        failed: why it was dropped.
        pruned: why it was not started.
    """

    candidate: Candidate
    results: list[Result] = field(default_factory=list)
    failed: str | None = None
    pruned: str | None = None

    @property
    def last(self) -> Result | None:
        """Of the latest rung that it was asked all repeats in; else what there is."""
        whole = [result for result in self.results if result.is_whole]
        return (whole or self.results or [None])[-1]

    def beside(self, other: "Trial") -> tuple[Result, Result] | None:
        """Both in the latest rung in which all repeats of both were asked; None where there is none."""
        of_other = {result.rung: result for result in other.results if result.is_whole}
        common = [(one, of_other[one.rung]) for one in self.results if one.is_whole and one.rung in of_other]
        return common[-1] if common else None

    def is_above(self, other: "Trial") -> bool:
        """Whether even its slowest repeat beside the other was faster than all of the other's: the spread tells them apart."""
        own, of_other = self.beside(other) or (None, None)
        return own is not None and min(own.ratios) > max(of_other.ratios)
