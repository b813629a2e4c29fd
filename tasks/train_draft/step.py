"""Forward and backward of one batch: all that the training loop asks of the arithmetic."""

from dataclasses import dataclass

import torch
from torch import nn

from tasks.common.draft import Eagle3Draft
from tasks.train_draft.batch import Batch
from tasks.train_draft.loss import STEP_WEIGHT, soft_cross_entropy
from tasks.train_draft.target_head import RestrictedHead


@dataclass(frozen=True)
class StepSums:
    """What the TTT steps 0..K-1 gave on one batch: tensors [K] on its device, without gradient.

    Attributes:
        loss: soft cross-entropy in nats, summed over the positions that give loss; float32.
        loss_positions: supervised positions whose target argmax the draft can propose; int64, as the next two.
        supervised: supervised positions; all count in accuracy.
        correct: positions where the draft's argmax is the target's.
    """

    loss: torch.Tensor
    loss_positions: torch.Tensor
    supervised: torch.Tensor
    correct: torch.Tensor


class TttLoss(nn.Module):
    """Loss of test-time training as one module, so that what hooks a forward (DDP, FSDP2) sees all of it.

    It computes in the type of the target's head; parameters and their gradients keep theirs.
    """

    def __init__(self, draft: Eagle3Draft, head: RestrictedHead, recompute_activations: bool = False):
        super().__init__()
        self.draft, self.head, self.recompute_activations = draft, head, recompute_activations

    def forward(self, batch: Batch, loss_positions: torch.Tensor) -> tuple[torch.Tensor, StepSums]:
        """Sum over steps of 0.8^i times the loss of step i over `loss_positions[i]` (contract, section 4).

        Args:
            loss_positions: int64 [K]: of this batch, or of all batches whose gradients are added up.

        Returns:
            scalar with gradient, and the sums of this batch.
        """
        lessons = batch.lessons
        of_steps = self.draft.unroll(batch.inputs, batch.samples.aux, self.recompute_activations)
        steps = torch.arange(len(of_steps), device=loss_positions.device)
        loss, totals, correct = soft_cross_entropy(
            torch.stack(of_steps).flatten(0, 1),
            self.draft.lm_head.weight,
            STEP_WEIGHT**steps / loss_positions.clamp(min=1),
            lessons,
            batch.samples.last,
            self.head,
        )
        return loss, StepSums(totals, lessons.loss_positions, lessons.supervised, correct)


class TrainStep:
    """Forward and backward of a batch; gradients are added to those of the draft's parameters.

    Attributes:
        module: the `TttLoss`; may be replaced by what wraps it (DDP).
        loss_gradient: a scalar from which each backward starts, where `module` divides gradients; None for 1.
    """

    def __init__(self, draft: Eagle3Draft, head: RestrictedHead, recompute_activations: bool = False):
        self.module: nn.Module = TttLoss(draft, head, recompute_activations)
        self.loss_gradient: torch.Tensor | None = None

    @staticmethod
    def loss_positions(batch: Batch) -> torch.Tensor:
        """Positions of `batch` that give loss at each step, int64 [K] on its device; known before any computation."""
        return batch.lessons.loss_positions

    def __call__(self, batch: Batch, loss_positions: torch.Tensor | None = None) -> tuple[torch.Tensor, StepSums]:
        """Run one batch.

        Args:
            loss_positions: what the loss of each step is divided by, int64 [K]; None takes this batch's own. Over
                several processes it is their sum: then the sum of the processes' gradients is that of the joint batch.

        Returns:
            the weighted loss, a scalar on the device without gradient, and the sums of this batch. Nothing waits
            for the device.
        """
        loss, sums = self.module(batch, self.loss_positions(batch) if loss_positions is None else loss_positions)
        loss.backward(self.loss_gradient)
        return loss.detach(), sums
