"""Where nothing records which layers a draft was trained on, the draft itself says it: it accepts most on those.

A list of ids that is shifted by one starts, speculates and loses a tenth of its acceptance on a small target. So the draft
is walked over the states of the layers beside those that its ids capture, too.
"""

from collections.abc import Sequence

from tasks.common.check import Check, Expectation
from tasks.common.live_checks.interview import Answer
from tasks.common.live_checks.rounds import OwnDraft
from tasks.common.live_checks.slots import WHY, Reference, answer_of

SHIFTS = (-1, 1)
# Two lists of layers are told apart by no less: more drafts right, as a share and in number, of a draft that works at all.
_MORE, _AT_LEAST, _WORKS = 0.05, 5, 1.2


def check_unrecorded_layers(
    own: OwnDraft, answers: Sequence[Answer], references: Sequence[Reference], layers: tuple[int, ...]
) -> Check:
    """Predicted acceptance on the layers that the ids capture, and one earlier and one later.

    Args:
        references: with `shifted` states.
    """
    want = Expectation("C3 unrecorded layers", f"most accepted on the outputs of layers {list(layers)}", WHY)
    walks = {shift: _correct(own, answers, references, shift) for shift in (0, *SHIFTS)}
    walks = {shift: correct for shift, correct in walks.items() if correct}
    if 0 not in walks or len(walks) == 1:
        return want.not_applicable("no states of the layers beside them")
    lengths = {shift: 1 + sum(correct) / len(correct) for shift, correct in walks.items()}
    found = "predicted acceptance length " + ", ".join(
        f"{length:.2f} on {[layer + shift for layer in layers]}" for shift, length in lengths.items()
    )
    if max(lengths.values()) < _WORKS:
        return want.not_applicable(f"{found}: too little to tell (held-out prompts: --hidden-states)")
    best = max(lengths, key=lambda shift: lengths[shift])
    more = sum(walks[best]) - sum(walks[0])
    if more >= _AT_LEAST and more > _MORE * sum(walks[0]):
        trained = [layer + best for layer in layers]
        return want.warning(
            f"{found}: it seems to have been trained on {trained}, one layer {'later' if best > 0 else 'earlier'}",
            f"Ask who trained it; if on the outputs of {trained}, name those in eagle_config and serve it again.",
        )
    return want.ok(found)


def _correct(own: OwnDraft, answers: Sequence[Answer], references: Sequence[Reference], shift: int) -> list[int]:
    """Right drafts of each round; empty where no reference has such states."""
    rounds: list[int] = []
    for reference in references:
        aux = reference.aux if shift == 0 else reference.shifted.get(shift)
        if aux is not None:
            rounds += own.correct(answer_of(answers, reference), aux)
    return rounds
