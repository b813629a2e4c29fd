"""Soft cross-entropy of test-time training, and what counts as a right prediction (contract, section 4)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tasks.common.draft import Eagle3Draft
from tasks.train_draft.data import Batch
from tasks.train_draft.target_head import RestrictedHead

# EAGLE-3: a later step of the chain counts only where the earlier ones were right.
STEP_WEIGHT = 0.8


@dataclass(frozen=True)
class StepLoss:
    """What TTT step i gives on one batch.

    Attributes:
        total: soft cross-entropy in nats, summed over the positions that give loss; scalar with gradient.
        loss_positions: supervised positions whose target argmax the draft can propose.
        supervised: supervised positions; all count in accuracy.
        correct: positions where the draft's argmax is the target's.
    """

    total: torch.Tensor
    loss_positions: int
    supervised: int
    correct: int


def ttt_losses(draft: Eagle3Draft, head: RestrictedHead, batch: Batch, num_steps: int) -> Iterator[StepLoss]:
    """Yield the loss of each TTT step 0..num_steps-1, on teacher-forced tokens.

    Step i at t predicts x_{t+2+i} and learns from the target's distribution at t + 1 + i. A supervised
    position whose target argmax lies outside the draft vocabulary gives no loss and counts as a miss.
    """
    samples = batch.samples
    labels = head.draft_id(batch.target_argmax)
    known = (labels >= 0).nonzero().squeeze(1)
    distributions = head.distribution(samples.last[known])
    for step, (rows, hidden) in enumerate(draft(samples, num_steps)):
        supervised = samples.supervised(step)[rows]
        source = samples.ahead(1 + step)[rows]
        gives_loss = supervised & (labels[source] >= 0)
        source = source[gives_loss]
        logits = draft.logits(hidden[gives_loss])
        wanted = distributions[torch.searchsorted(known, source)]
        yield StepLoss(
            total=-(wanted * logits.log_softmax(-1)).sum(),
            loss_positions=len(source),
            supervised=int(supervised.sum()),
            # The largest logit is the label's: an argmax, at a fraction of its time on a CPU.
            correct=int((logits.detach().gather(1, labels[source, None])[:, 0] == logits.detach().amax(-1)).sum()),
        )


def weighted_loss(steps: Sequence[StepLoss]) -> torch.Tensor:
    """Sum over steps of 0.8^i times the mean of step i over the positions that give loss."""
    return sum(STEP_WEIGHT**i * step.total / max(step.loss_positions, 1) for i, step in enumerate(steps))
