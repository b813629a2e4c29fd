"""Is the draft fed the states that it was trained on? Slot by slot, and where not: which state is it really? (contract, section 6)"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tasks.common.check import Check, Expectation
from tasks.common.live_checks.interview import Answer
from tasks.common.parity import Agreement, Match, all_states, find_state, output_name

# A state of a token does not depend on later tokens, so a beginning is enough to tell which one it is.
_NAMED_TOKENS = 64
# Without all states of the target the nearest one need not be the right one; a wrong layer is 0.2 away (infra/docs/serving.md).
_CERTAIN = 0.1
_MARGIN = 3.0
WHY = "A draft that is fed other states than it was trained on accepts little or nothing, and nothing fails."


@dataclass(frozen=True)
class Reference:
    """States of one answer's tokens from elsewhere than the server.

    Attributes:
        source: 'the dump' or 'transformers'.
        prompt: id of the prompt.
        input_ids: int [T], prompt and answer.
        aux: what each slot must hold, [T, n_aux, H]; None where nothing says which layers.
        states: states of the target that a slot could hold by mistake, by name, [at most T, H] each.
        complete: whether these are all of `all_states`.
        shifted: as aux, of the layers so many later; computed where nothing records which layers the draft learnt from.
    """

    source: str
    prompt: str
    input_ids: torch.Tensor
    aux: torch.Tensor | None
    states: dict[str, torch.Tensor]
    complete: bool = True
    shifted: dict[int, torch.Tensor] = field(default_factory=dict)

    def name(self, state: torch.Tensor) -> Match | None:
        """Which state of the target this is, [at most T, H]; None where that cannot be told."""
        tokens = min(len(state), *(len(known) for known in self.states.values()))
        match = find_state(state[:tokens], {name: known[:tokens] for name, known in self.states.items()})
        return match if self.complete or match.error < _CERTAIN else None


@dataclass(frozen=True)
class SlotParity:
    """One slot of one answer, served against a reference.

    Attributes:
        match: which state it is, and the runner-up.
        held: the same of the reference's slot: a dump may hold others than its contract says.
        first_served: first five values of the last token.
    """

    prompt: str
    source: str
    slot: int
    layer: int
    agreement: Agreement
    match: Match | None
    held: Match | None
    first_served: list[float]
    first_expected: list[float]

    @property
    def is_named(self) -> bool:
        """Whether it is nearer to the expected layer than to every other state; true where that cannot be told."""
        return self.match is None or self.match.name == output_name(self.layer)

    def passes(self, limit: float) -> bool:
        """Near enough, and the expected layer."""
        return self.agreement.relative_error <= limit and self.is_named

    @property
    def is_certain(self) -> bool:
        """The expected layer by a wide margin on both sides, however far it is from the reference."""
        matches = (self.match, self.held)
        return all(
            match is not None
            and match.name == output_name(self.layer)
            and match.runner_up_error > _MARGIN * match.error
            for match in matches
        )


def named_states(model, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """`all_states` of the beginning of a sequence."""
    return all_states(model, input_ids[:_NAMED_TOKENS])


def answer_of(answers: Sequence[Answer], reference: Reference) -> Answer:
    """The answer whose states a reference has."""
    return next(answer for answer in answers if answer.prompt.id == reference.prompt)


def common_tokens(answer: Answer, reference: Reference) -> int:
    """Tokens of an answer, prompt included, that a reference has too."""
    pairs = enumerate(zip(answer.token_ids, reference.input_ids.tolist(), strict=False))
    shorter = min(len(answer.token_ids), len(reference.input_ids))
    return next((place for place, (ours, theirs) in pairs if ours != theirs), shorter)


def compare(answer: Answer, reference: Reference, layers: Sequence[int]) -> list[SlotParity]:
    """Compare the tokens that both have, slot by slot.

    Args:
        answer: its states must be n_aux * H wide, without a row missing.
        layers: outputs that the slots must hold.
    """
    tokens = common_tokens(answer, reference)
    served, expected = answer.states[:tokens].unflatten(1, (len(layers), -1)), reference.aux[:tokens]
    return [
        SlotParity(
            prompt=answer.prompt.id,
            source=reference.source,
            slot=slot,
            layer=layer,
            agreement=Agreement.of(served[:, slot], expected[:, slot]),
            match=reference.name(served[:, slot]),
            held=reference.name(expected[:, slot]),
            first_served=served[-1, slot, :5].tolist(),
            first_expected=expected[-1, slot, :5].tolist(),
        )
        for slot, layer in enumerate(layers)
    ]


def check_slots(
    parity: Sequence[SlotParity], limit: float, gated: bool, said_by: str, fix: Callable[[list[Match | None]], str]
) -> list[Check]:
    """A verdict for each slot and source, over all answers.

    Args:
        limit: of the relative error.
        gated: whether a slot beyond the limit is an error even where it is certainly the right layer.
        said_by: what says which layers the slots must hold.
        fix: takes what each slot of the worst answer holds.
    """
    checks = []
    for source, slot in sorted({(row.source, row.slot) for row in parity}):
        rows = [row for row in parity if (row.source, row.slot) == (source, slot)]
        worst = max(rows, key=lambda row: (not row.passes(limit), row.agreement.relative_error))
        expected = f"{output_name(worst.layer)}, as {said_by} says; relative error to {source} at most {limit:g}"
        want = Expectation(f"C3 slot {slot} ({source})", expected, WHY)
        if worst.passes(limit):
            checks.append(want.ok(f"{output_name(worst.layer)}: {_figures(worst)}"))
            continue
        slots = [row.match for row in parity if (row.source, row.prompt) == (source, worst.prompt)]
        text, own_fix = _explain(worst)
        verdict = want.warning if worst.is_certain and not gated else want.error
        checks.append(verdict(f"{text}: {_figures(worst)}", own_fix or fix(slots)))
    return checks


def _explain(row: SlotParity) -> tuple[str, str | None]:
    """What a slot really is, and what to do where the layer ids are not to blame."""
    expected = output_name(row.layer)
    if row.match is None:
        return f"not {expected}", None
    if row.match.name != expected:
        return f"it is {row.match}; the contract says {expected}", None
    if row.held is not None and row.held.name != expected:
        return (
            f"it is {row.match}, as the contract says, but {row.source} holds {row.held}",
            "Dump the hidden states again, and train on those: the draft learnt from other layers than its contract says.",
        )
    return (
        f"it is {row.match}, but not computed alike",
        f"Compare precision, quantisation, KV cache type and attention backend of the server with those of {row.source}. "
        f"Where others ask the server at the same time, ask again alone: a batch can mix up rows.",
    )


def _figures(row: SlotParity) -> str:
    agreement = row.agreement
    return (
        f"relative error {agreement.relative_error:.1e}, cosine {agreement.cosine:.6f}, norm ratio "
        f"{agreement.norm_ratio:.6f}; last token {_five(row.first_served)} served, {_five(row.first_expected)} in {row.source}"
    )


def _five(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
