"""Does the server speculate at all, and accept as much as the draft promises?"""

from collections.abc import Sequence

from tasks.common.acceptance import pool
from tasks.common.check import Check, Expectation
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.interview import Answer

_WARN, _ERROR = 0.10, 0.25
# Below this nothing is gained whatever the server costs, and a draft that was trained at all is above it.
_NOTHING = 1.1
_POOR = "Ask prompts like those that it was trained on (--hidden-states with held-out samples), or train it on more."


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


def check_acceptance(answers: Sequence[Answer], predicted: tuple[list[int], str] | None) -> Check:
    """The served acceptance length against the walking estimate (contract, section 4).

    Args:
        predicted: correct drafts of each round of our own walk over states that are not the server's, and whose they
            are; None where there are none.
    """
    want = Expectation(
        "S4 acceptance",
        f"the predicted acceptance length; a warning beyond {_WARN:.0%}, an error beyond {_ERROR:.0%}",
        "A served draft that accepts less than it does on the states that it was trained on is served otherwise.",
    )
    try:
        served = pool(answer.completion for answer in answers)
    except DraftlineError as error:
        return want.error(str(error), "See S4 speculation.")
    length = served.accept_length
    found = f"{length:.2f} ({served.correct} drafts right in {served.rounds} rounds)"
    if predicted is None or not predicted[0]:
        text = f"{found}; nothing predicts it (--target with weights, or --hidden-states)"
        return (
            want.warning(f"{text}; next to nothing is accepted", _POOR)
            if length < _NOTHING
            else want.not_applicable(text)
        )
    rounds, source = predicted
    expected = 1 + sum(rounds) / len(rounds)
    apart = length / expected - 1
    text = f"{found}; predicted from {source}: {expected:.2f}, {apart:+.1%}"
    if abs(apart) > _WARN:
        fix = (
            "Look at the slots, the served draft and the plan above; where they are right, at the answers of the dump."
        )
        return want.error(text, fix) if abs(apart) > _ERROR else want.warning(text, fix)
    return (
        want.warning(f"{text}; next to nothing is accepted, as predicted", _POOR)
        if length < _NOTHING
        else want.ok(text)
    )
