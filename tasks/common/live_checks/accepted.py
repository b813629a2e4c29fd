"""Does the server speculate at all, and accept as much as the draft promises?"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.common.acceptance import pool
from tasks.common.check import Check, Expectation
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.interview import Answer

_WARN, _ERROR = 0.10, 0.25
# Below this nothing is gained whatever the server costs, and a draft that was trained at all is above it.
_NOTHING = 1.1
_POOR = "Ask prompts like those that it was trained on (--hidden-states with held-out samples), or train it on more."


@dataclass(frozen=True)
class Prediction:
    """Our own walk over states that are not the server's (contract, section 4).

    Attributes:
        source: whose states.
        answers: that were walked.
        correct: drafts right in each round.
    """

    source: str
    answers: Sequence[Answer]
    correct: list[int]

    @property
    def accept_length(self) -> float:
        return 1 + sum(self.correct) / len(self.correct)


def check_speculation(answers: Sequence[Answer]) -> Check:
    """S4: draft tokens were verified."""
    want = Expectation(
        "S4 speculation",
        "verification rounds above zero",
        "A server that never speculated reports an acceptance length of 1.0 as if it had.",
    )
    rounds = sum(answer.completion.verify_rounds for answer in answers)
    if not rounds:
        return want.error(
            f"0 rounds for {len(answers)} answers: no speculation ran",
            "Start it with --speculative-algorithm EAGLE3 and --speculative-draft-model-path.",
        )
    return want.ok(f"{rounds} rounds for {len(answers)} answers")


def check_acceptance(answers: Sequence[Answer], predicted: Prediction | None, unpredicted: str) -> Check:
    """The served acceptance length against the walking estimate, over the same answers.

    Args:
        unpredicted: why there is no prediction, where there is none.
    """
    want = Expectation(
        "S4 acceptance",
        f"the predicted acceptance length; a warning beyond {_WARN:.0%}, an error beyond {_ERROR:.0%}",
        "A served draft that accepts less than it does on the states that it was trained on is served otherwise.",
    )
    try:
        served = pool(answer.completion for answer in (predicted.answers if predicted else answers))
    except DraftlineError as error:
        return want.error(str(error), "Nothing can be said of the acceptance before that is so.")
    length = served.accept_length
    found = f"{length:.2f} ({served.correct} drafts right in {served.rounds} rounds)"
    if predicted is None:
        text = f"{found}; nothing predicts it: {unpredicted}"
        return (
            want.warning(f"{text}; next to nothing is accepted", _POOR)
            if length < _NOTHING
            else want.not_applicable(text)
        )
    apart = length / predicted.accept_length - 1
    text = f"{found}; predicted from the states of {predicted.source}: {predicted.accept_length:.2f}, {apart:+.1%}"
    if abs(apart) > _WARN:
        fix = "Mend what C1, C3 and W3 found; where they found nothing, compare the server's flags with those of the dump."
        return want.error(text, fix) if abs(apart) > _ERROR else want.warning(text, fix)
    return (
        want.warning(f"{text}; next to nothing is accepted, as predicted", _POOR)
        if length < _NOTHING
        else want.ok(text)
    )
