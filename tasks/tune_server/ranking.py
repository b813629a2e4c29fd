"""Where a candidate stands among others: settings count only where the repeats tell them from the numbers alone."""

from collections.abc import Iterable

from tasks.tune_server.candidates import Candidate
from tasks.tune_server.results import Trial


def standing(trial: Trial, bare: Trial | None) -> tuple[int, float, bool]:
    """What to sort measured trials by, the best last: rung, speed; of settings that do not help no more than without them.

    Args:
        bare: the same numbers without settings, where they were measured.
    """
    own = (trial.last.rung, trial.last.speedup, not trial.candidate.options)
    if not trial.candidate.options or bare is None or helps(trial, bare):
        return own
    return min(own, (bare.last.rung, bare.last.speedup, False))


def helps(trial: Trial, bare: Trial | None) -> bool:
    """Whether its settings make it faster than the same numbers without, by more than the repeats vary."""
    return bare is not None and trial.is_above(bare)


def bare_of(candidate: Candidate, trials: Iterable[Trial]) -> Trial | None:
    """The same numbers without settings, where they were measured."""
    alike = (trial for trial in trials if trial.candidate.shape == candidate.shape and not trial.candidate.options)
    return next((trial for trial in alike if trial.last), None)
