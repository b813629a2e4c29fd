"""What the draft proposes, for people to read: some rounds of the walk over a held-out answer."""

from dataclasses import dataclass

import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts
from tasks.train_draft.data import DraftData

_SAMPLES, _ROUNDS, _CONTEXT = 3, 6, 24  # rounds of each sample, tokens shown before them


@dataclass(frozen=True)
class Proposal:
    """One round.

    Attributes:
        context: the last token ids that were given.
        target, draft: token ids that the answer goes on with, and that the draft proposes.
        accepted: leading tokens that are the same.
    """

    sample_id: str
    context: list[int]
    target: list[int]
    draft: list[int]
    accepted: int


@torch.no_grad()
def sample_proposals(draft: Eagle3Draft, heldout: DraftData, num_steps: int, vocab_map: VocabMap) -> list[Proposal]:
    """The first rounds that a server would spend on a few held-out answers."""
    usable = heldout.usable
    found: list[Proposal] = []
    for index in usable[:: max(1, len(usable) // _SAMPLES)][:_SAMPLES].tolist():
        samples = heldout.read([index]).samples
        rows = round_starts(samples)
        if not len(rows):
            continue
        proposed = draft.propose(samples, rows, num_steps, vocab_map)
        accepted = dict(zip(rows.tolist(), correct_drafts(samples, rows, proposed).tolist(), strict=True))
        chains = dict(zip(rows.tolist(), proposed.tolist(), strict=True))
        ids, t = samples.input_ids.tolist(), min(chains)
        for _ in range(_ROUNDS):
            if t not in chains:
                break
            target = ids[t + 2 : t + 2 + num_steps]
            found.append(
                Proposal(samples.sample_ids[0], ids[max(0, t + 2 - _CONTEXT) : t + 2], target, chains[t], accepted[t])
            )
            t += accepted[t] + 1
    return found


def as_columns(step: int, proposals: list[Proposal], tokenizer) -> dict[str, list]:
    """A table, a row a round: tokens as text, '|' between them."""

    def pieces(ids: list[int]) -> str:
        return " | ".join(tokenizer.decode([token]) for token in ids)

    return {
        "step": [step] * len(proposals),
        "sample": [proposal.sample_id for proposal in proposals],
        "context": [tokenizer.decode(proposal.context) for proposal in proposals],
        "target": [pieces(proposal.target) for proposal in proposals],
        "draft": [pieces(proposal.draft) for proposal in proposals],
        "accepted": [proposal.accepted for proposal in proposals],
    }
