"""Numbers of steps that are still on the device, read a few steps at a time: reading one waits for the device."""

from dataclasses import dataclass

import torch

from tasks.train_draft.health import BatchVitals, Vitals
from tasks.train_draft.loss import STEP_WEIGHT
from tasks.train_draft.processes import Processes
from tasks.train_draft.step import StepSums

# Sample ids, tokens, and what `_rows` makes of the sums.
_Batch = tuple[tuple[str, ...], int, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """Steps since the last reading, over all processes.

    Attributes:
        accuracy_by_position: on teacher-forced tokens, one per TTT step.
        gradient_norm: the largest, before it was clipped.
        steps: each of them.
    """

    accuracy_by_position: list[float]
    gradient_norm: float
    tokens: int
    steps: list[Vitals]


class Meters:
    """Takes in batches and steps without waiting."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._batches: list[_Batch] = []
        self._steps: list[tuple[int, torch.Tensor, list[_Batch]]] = []

    @property
    def unread(self) -> bool:
        return bool(self._steps)

    def add_batch(self, sample_ids: tuple[str, ...], tokens: int, sums: StepSums) -> None:
        """A batch of the step that is under way; the sums are copied, since a later step may reuse their memory."""
        self._batches.append((sample_ids, tokens, _rows(sums)))

    def end_step(self, step: int, gradient_norm: torch.Tensor) -> None:
        """All batches of this step were added."""
        self._steps.append((step, gradient_norm, self._batches))
        self._batches = []

    def read(self) -> Reading:
        """Wait for the device, add up over processes, and begin anew; every process takes part."""
        own = torch.stack([torch.stack([rows for _, _, rows in batches]) for _, _, batches in self._steps])
        tokens = sum(tokens for _, _, batches in self._steps for _, tokens, _ in batches)
        totals = own.sum(1)
        rest = torch.tensor([tokens], dtype=totals.dtype, device=totals.device)
        *summed, tokens = self._processes.sum(torch.cat([totals.flatten(), rest])).tolist()
        totals = torch.tensor(summed, dtype=torch.float64).view(totals.shape)
        norms = torch.stack([norm for _, norm, _ in self._steps]).tolist()
        own_losses = own[:, :, 0].sum(-1).tolist()
        weights = STEP_WEIGHT ** torch.arange(totals.shape[-1], dtype=torch.float64)
        losses = (weights * totals[:, 0] / totals[:, 1].clamp(min=1)).sum(-1).tolist()
        steps = [
            Vitals(
                step=step,
                loss=losses[n],
                gradient_norm=norms[n],
                loss_positions=int(totals[n, 1, 0]),
                supervised=int(totals[n, 2, 0]),
                batches=tuple(BatchVitals(ids, loss) for (ids, _, _), loss in zip(batches, own_losses[n], strict=True)),
            )
            for n, (step, _, batches) in enumerate(self._steps)
        ]
        self._steps = []
        return Reading(
            accuracy_by_position=(totals[:, 3].sum(0) / totals[:, 2].sum(0).clamp(min=1)).tolist(),
            gradient_norm=max(norms),
            tokens=int(tokens),
            steps=steps,
        )


def _rows(sums: StepSums) -> torch.Tensor:
    """float64 [4, K]: loss, loss positions, supervised, correct."""
    return torch.stack([t.double() for t in (sums.loss, sums.loss_positions, sums.supervised, sums.correct)])
