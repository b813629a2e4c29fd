"""When a draft pays: the acceptance length at which a round of draft and verify costs what it saves.

A round yields AL = 1 + (sum of the survivals) tokens (contract, section 4) and pays where AL is above round / plain step,
the break-even. What is drafted at position i of a chain (top-k 1) does not depend on whether positions behind it follow:
of the rounds measured with s steps, survival gives the acceptance length at every fewer steps exactly. (With fewer steps
rounds would begin at other tokens as well; that is left out.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tasks.common.files import REPORTS
from tasks.common.forms import Form

# Fewer steps are advised where they promise more than this beyond what is.
_WORTH = 1.01
# No fit of a few runs tells what more doublings of the data than this would do.
_MOST_DOUBLINGS = 10


@dataclass(frozen=True)
class RoundTime:
    """Time of a round by draft steps, a line: `fixed + steps * step`; any unit."""

    fixed: float
    step: float

    @classmethod
    def through(cls, measured: Mapping[int, float]) -> "RoundTime | None":
        """Least squares through times by steps; None with fewer than two numbers of steps, which leave the slope open.

        Neither part of a round takes less than no time: what falls below zero is noise and is taken as zero.
        """
        if len(measured) < 2:
            return None
        steps, time = fmean(measured), fmean(measured.values())
        rise = sum((s - steps) * (t - time) for s, t in measured.items())
        step = max(0.0, rise / sum((s - steps) ** 2 for s in measured))
        if time < step * steps:
            return cls(0.0, sum(s * t for s, t in measured.items()) / sum(s**2 for s in measured))
        return cls(time - step * steps, step)

    def at(self, steps: int) -> float:
        """Time of a round of so many steps."""
        return self.fixed + steps * self.step

    def step_share(self, steps: int) -> float:
        """Share that one draft step has in a round of so many."""
        return self.step / self.at(steps)


def accept_length_at(survival: Sequence[float], steps: int) -> float:
    """Acceptance length of a chain of `steps`, from the survival by position measured with at least as many.

    Raises:
        ValueError: fewer were measured.
    """
    if steps > len(survival):
        raise ValueError(f"survival of {len(survival)} positions says nothing of {steps} steps")
    return 1 + sum(survival[:steps])


def prolonged(survival: Sequence[float], steps: int) -> list[float]:
    """Survival at `steps` positions: what was measured, then as if each further token survived like the last one did."""
    before, last = (1.0, *survival)[-2:]
    ratio = last / before if before else 0.0
    return [*survival, *(last * ratio**further for further in range(1, steps - len(survival) + 1))][:steps]


def predicted_speedup(accept_length: float, round_time: float, plain_step: float) -> float:
    """Tokens per second with the draft over those without, prefill left out; times in one unit."""
    return accept_length * plain_step / round_time


def advice(
    accept_length: float,
    survival: Sequence[float],
    steps: int,
    break_even: float,
    *,
    topk: int = 1,
    is_faster: bool = True,
    draft_step_share: float | str | None = None,
    scaling: Mapping[str, Any] | None = None,
) -> list[str]:
    """What is missing until the draft pays, in sentences.

    Args:
        accept_length: reached, with `steps` draft steps.
        survival: by position, as many as `steps`.
        break_even: needed: time of a round over time of a plain step.
        is_faster: whether the interval of the speed-up, prefill included, is above 1; else what was measured is said, and no verdict.
        draft_step_share: share of the round that one draft step takes, or None where it was not measured, or why it cannot be read
            (`advice_reports.measured_step_share`).
        scaling: reports/scaling.json (`advice_reports.scaling_fit`); None where there is none. Read are `tokens`, trained on, and
            `accept_length_per_doubling` of them.
    """
    speedup = accept_length / break_even
    if speedup >= 1:
        pays = "the draft pays, decoding is" if is_faster else "in these passes decoding was"
        found = [f"You need {break_even:.2f}, you have {accept_length:.2f}: {pays} {speedup:.2f} times as fast."]
    else:
        found = [
            f"You need {break_even:.2f}, you have {accept_length:.2f}: a round takes as long as {break_even:.2f} plain steps, so "
            f"that decoding is {speedup:.2f} times as fast as without the draft."
        ]
    if topk == 1 and steps > 1:
        found.append(_fewer_steps(survival, steps, break_even, speedup, draft_step_share))
    if speedup < 1:
        found.append(_more_data(break_even - accept_length, break_even, steps, scaling))
    return found


class _Scaling(Form):
    """What is read of reports/scaling.json."""

    tokens: Annotated[float, Field(gt=0)]
    accept_length_per_doubling: float


def _fewer_steps(
    survival: Sequence[float], steps: int, break_even: float, speedup: float, draft_step_share: float | str | None
) -> str:
    if isinstance(draft_step_share, str):
        return f"Whether fewer draft steps would pay more is not known: {draft_step_share}"
    if draft_step_share is None:
        return (
            "Whether fewer draft steps would pay more is not known: how much of a round one step takes was not measured at this "
            "number of requests with these flags (`python -m tasks.tune_server` and `python -m tasks.profile_server` do)."
        )
    promised = [
        # A round holds a forward of the target, as a plain step does.
        (accept_length_at(survival, fewer), max(1.0, break_even * (1 - draft_step_share * (steps - fewer))), fewer)
        for fewer in range(1, steps)
    ]
    reached, needed, fewer = max(promised, key=lambda one: one[0] / one[1])
    would = f"{fewer} draft step{'s' * (fewer > 1)} instead of {steps} would need {needed:.2f} and reach {reached:.2f}"
    if reached / needed <= speedup * _WORTH:
        return f"Fewer draft steps would not help: {would}."
    return f"{would}: {reached / needed:.2f} times as fast as without the draft."


def _more_data(missing: float, needed: float, steps: int, scaling: Mapping[str, Any] | None) -> str:
    path = REPORTS / "scaling.json"
    if needed > steps + 1:
        return (
            f"{needed:.2f} cannot be reached with {steps} draft step{'s' * (steps > 1)}, whatever the draft: a round yields "
            f"{steps + 1} tokens at most."
        )
    if scaling is None:
        return f"How far more training data would help is not known: that needs a scaling fit, and there is no {path}."
    try:
        fit = _Scaling.model_validate(scaling)
    except ValidationError:  # a report that was measured is worth more than this sentence
        return (
            f"How far more training data would help is not known: {path} must be JSON with the numbers "
            f"`accept_length_per_doubling` and `tokens`, the latter above 0. Make it again, or remove it."
        )
    gain, tokens = fit.accept_length_per_doubling, fit.tokens
    if gain <= 0:
        return f"More training data does not help by the fit of {path}: {gain:+.2f} a doubling."
    if missing / gain > _MOST_DOUBLINGS:
        return (
            f"More training data hardly helps by the fit of {path}: a doubling adds {gain:.2g}, so that {needed:.2f} would need more "
            f"than {2**_MOST_DOUBLINGS} times the {tokens / 1e6:.1f} M tokens trained on."
        )
    return (
        f"More training data helps by the fit of {path}: a doubling adds {gain:.2f}, so that {needed:.2f} would need about "
        f"{2 ** math.ceil(missing / gain)} times the {tokens / 1e6:.1f} M tokens trained on."
    )
