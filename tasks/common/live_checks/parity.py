"""Is the draft fed the states that it was trained on? Slot by slot, and where not: which state is it really? (contract, section 6)"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tasks.common.check import Check, Expectation
from tasks.common.live_checks.interview import Answer
from tasks.common.parity import Agreement, Match, all_states, find_state, output_name

# A state of a token does not depend on later tokens, so a beginning is enough to tell which one it is.
_NAMED_TOKENS = 64
_WHY = "A draft that is fed other states than it was trained on accepts nothing, and nothing fails."


@dataclass(frozen=True)
class Reference:
    """States of one answer's tokens from elsewhere than the server.

    Attributes:
        source: 'the dump' or 'transformers'.
        prompt: id of the prompt.
        input_ids: int [T], prompt and answer, and what follows it where that is known.
        aux: what each slot must hold, [T, n_aux, H].
        states: every state of the target that a slot could hold by mistake, by name, [at most T, H] each; empty where
            the target cannot be run here.
    """

    source: str
    prompt: str
    input_ids: torch.Tensor
    aux: torch.Tensor
    states: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SlotParity:
    """One slot of one answer, served against a reference.

    Attributes:
        match: which state it is, and the runner-up; None where the target cannot be run here.
        first_served: first five values of the last token.
    """

    prompt: str
    source: str
    slot: int
    layer: int
    agreement: Agreement
    match: Match | None
    first_served: list[float]
    first_expected: list[float]

    def passes(self, limit: float) -> bool:
        """Near enough, and nearer to the expected layer than to every other state."""
        named = self.match is None or self.match.name == output_name(self.layer)
        return self.agreement.relative_error <= limit and named


def named_states(model, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """`all_states` of the beginning of a sequence."""
    return all_states(model, input_ids[:_NAMED_TOKENS])


def compare(answer: Answer, reference: Reference, layers: Sequence[int]) -> list[SlotParity]:
    """Compare the tokens that both have, slot by slot.

    Args:
        answer: its states must be n_aux * H wide, without a row missing.
        layers: outputs that the slots must hold.
    """
    tokens = _common(answer.token_ids, reference.input_ids.tolist())
    served = answer.states[:tokens].unflatten(1, (len(layers), -1))
    expected = reference.aux[:tokens]
    return [
        SlotParity(
            prompt=answer.prompt.id,
            source=reference.source,
            slot=slot,
            layer=layer,
            agreement=Agreement.of(served[:, slot], expected[:, slot]),
            match=name_slot(served[:, slot], reference),
            first_served=served[-1, slot, :5].tolist(),
            first_expected=expected[-1, slot, :5].tolist(),
        )
        for slot, layer in enumerate(layers)
    ]


def name_slot(state: torch.Tensor, reference: Reference) -> Match | None:
    """Which state of the target a slot [T, H] holds."""
    if not reference.states:
        return None
    tokens = min(len(state), *(len(known) for known in reference.states.values()))
    return find_state(state[:tokens], {name: known[:tokens] for name, known in reference.states.items()})


def check_slots(parity: Sequence[SlotParity], limit: float, fix: Callable[[list[Match | None]], str]) -> list[Check]:
    """A verdict for each slot and source, over all answers.

    Args:
        limit: of the relative error.
        fix: takes what each slot of the worst answer holds.
    """
    checks = []
    for source, slot in sorted({(row.source, row.slot) for row in parity}):
        rows = [row for row in parity if (row.source, row.slot) == (source, slot)]
        worst = max(rows, key=lambda row: (not row.passes(limit), row.agreement.relative_error))
        want = Expectation(
            f"C3 slot {slot}",
            f"{output_name(worst.layer)}, as {source} has it; relative error at most {limit:g}",
            _WHY,
        )
        if worst.passes(limit):
            checks.append(want.ok(f"{output_name(worst.layer)}: {_figures(worst)}"))
            continue
        slots = [row.match for row in parity if (row.source, row.prompt) == (source, worst.prompt)]
        checks.append(want.error(f"{_what_it_is(worst)}: {_figures(worst)}", fix(slots)))
    return checks


def _what_it_is(row: SlotParity) -> str:
    if row.match is None:
        return f"not {output_name(row.layer)}"
    if row.match.name == output_name(row.layer):
        return f"{row.match}, but not computed alike: another precision, or rows that a batch mixed up"
    return f"it is {row.match}; the contract says {output_name(row.layer)}"


def _figures(row: SlotParity) -> str:
    agreement = row.agreement
    return (
        f"relative error {agreement.relative_error:.1e}, cosine {agreement.cosine:.6f}, norm ratio "
        f"{agreement.norm_ratio:.6f}; last token {_five(row.first_served)} served, {_five(row.first_expected)} in {row.source}"
    )


def _five(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _common(ours: list[int], theirs: list[int]) -> int:
    """Length of the common beginning of two sequences."""
    pairs = zip(ours, theirs, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
