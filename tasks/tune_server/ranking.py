"""Where a candidate stands among others: settings count only where the repeats tell them from the numbers alone."""

from collections.abc import Collection, Iterable

from tasks.tune_server.candidates import Candidate
from tasks.tune_server.results import Trial


def ranked(trials: Iterable[Trial], known: Collection[Trial]) -> list[Trial]:
    """Measured trials, the best first: those of the latest rung, then the faster ones.

    None stands before one that was clearly faster in the latest rung that both were in, however many more the first was in;
    what other rungs say of them are other questions and other minutes.

    Args:
        known: all that were made; they may hold the same numbers without settings.
    """
    left = sorted(trials, key=lambda trial: _standing(trial, bare_of(trial.candidate, known)), reverse=True)
    above = {one.candidate: {other.candidate for other in left if other.is_above(one)} for one in left}
    found: list[Trial] = []
    while left:
        names = {trial.candidate for trial in left}
        # Three that beat each other in a circle, each in another rung, leave the first.
        best = next((trial for trial in left if names.isdisjoint(above[trial.candidate])), left[0])
        found.append(best)
        left.remove(best)
    return found


def helps(trial: Trial, bare: Trial | None) -> bool:
    """Whether its settings make it faster than the same numbers without, by more than the repeats vary."""
    return bare is not None and trial.is_above(bare)


def bare_of(candidate: Candidate, trials: Iterable[Trial]) -> Trial | None:
    """The same numbers without settings, where they were measured."""
    alike = (trial for trial in trials if trial.candidate.shape == candidate.shape and not trial.candidate.options)
    return next((trial for trial in alike if trial.last), None)


def _standing(trial: Trial, bare: Trial | None) -> tuple[bool, int, float, bool]:
    """What to sort by, the best last; settings that do not help stand no higher than the same numbers without: of many
    useless settings one is always the fastest."""
    own = (trial.last.is_whole, trial.last.rung, trial.last.speedup, not trial.candidate.options)
    if not trial.candidate.options or bare is None or helps(trial, bare):
        return own
    return min(own, (bare.last.is_whole, bare.last.rung, bare.last.speedup, False))
