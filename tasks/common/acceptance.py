"""Acceptance as the contract defines it (section 4), from what a server reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import Completion


@dataclass(frozen=True)
class Acceptance:
    """Verification rounds of a set of answers, pooled.

    Attributes:
        rounds: target forwards that verified a draft.
        correct: draft tokens that the target agreed with.
        histogram: [c] counts the rounds with c correct draft tokens.
    """

    rounds: int
    correct: int
    histogram: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """AL = 1 + sum(correct drafts) / sum(rounds): exactly 1 where nothing was accepted.

        SGLang's own spec_accept_length counts the prefill's token and reads above 1 there.
        """
        return 1 + self.correct / self.rounds

    def survival(self, steps: int) -> list[float]:
        """Share of rounds in which draft tokens 1..i are all correct, for i = 1..steps; it sums to AL - 1."""
        return [sum(self.histogram[position:]) / self.rounds for position in range(1, steps + 1)]


def pool(completions: Iterable[Completion]) -> Acceptance:
    """Pool the rounds of many answers: each round weighs the same, not each answer.

    Raises:
        DraftlineError: no speculation ran at all, or SGLang's counts contradict each other.
    """
    rounds, correct, histogram = 0, 0, []
    for completion in completions:
        rounds += completion.verify_rounds
        correct += completion.correct_drafts
        longest = max(len(histogram), len(completion.correct_drafts_histogram))
        histogram += [0] * (longest - len(histogram))
        for length, count in enumerate(completion.correct_drafts_histogram):
            histogram[length] += count
    if not rounds:
        raise DraftlineError(
            "no speculation ran at all: the server verified 0 rounds. An acceptance length of 1.0 would be a lie. See its "
            "log for 'speculative', and its command line: `python -m tasks.launch_server --print`."
        )
    if (sum(histogram), sum(length * count for length, count in enumerate(histogram))) != (rounds, correct):
        raise DraftlineError(
            f"SGLang reports {rounds} rounds and {correct} correct draft tokens, but a histogram {histogram} that says "
            f"otherwise: this version counts in another way than 0.5.16 and 0.5.23. Nothing can be derived from it."
        )
    return Acceptance(rounds, correct, tuple(histogram))
