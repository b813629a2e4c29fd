"""Hidden states as packed batches, in an order that depends on the seed and the epoch alone."""

from dataclasses import dataclass

import numpy as np
import torch

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates
from tasks.common.packing import PackedSamples


@dataclass(frozen=True)
class Batch:
    """Packed samples with the target's own next token.

    Attributes:
        target_argmax: argmax of the target's full distribution at each position, int64 [T]; -1 where the
            assistant did not write the next token.
    """

    samples: PackedSamples
    target_argmax: torch.Tensor


class DraftData:
    """The samples of one split that supervise something; states are read with their batch, never all at once."""

    def __init__(self, states: HiddenStates, target_argmax: np.ndarray, batch_tokens: int, device: str):
        """
        Args:
            target_argmax: int32 over the tokens of the split, in its order (see `cache_target_argmax`).

        Raises:
            DraftlineError: no sample has a supervised position.
        """
        self.states, self.batch_tokens, self.device = states, batch_tokens, device
        self.target_argmax = target_argmax
        self.starts = np.cumsum([0, *(row.tokens for row in states.samples)])
        # The draft predicts from the third token on, and only what the assistant wrote.
        self.usable = [index for index in range(len(states)) if bool(states.read_tokens(index)[1][2:].any())]
        if not self.usable:
            raise DraftlineError(
                f"{states.folder}: none of the {len(states)} samples has a supervised position (loss mask 1 beyond the second "
                f"token): there is nothing to train on. The mask density of each is in reports/gates/hidden_states.json."
            )

    def batches(self, order: list[int]) -> list[list[int]]:
        """Pack samples in this order. A batch closes before it would exceed `batch_tokens`; no sample is dropped."""
        batches: list[list[int]] = []
        room = 0
        for index in order:
            tokens = self.states.samples[index].tokens
            if not batches or tokens > room:
                batches.append([])
                room = self.batch_tokens
            batches[-1].append(index)
            room -= tokens
        return batches

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """Batches of one pass over the split, shuffled by (seed, epoch)."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.usable), generator=generator).tolist()
        return self.batches([self.usable[i] for i in order])

    def read(self, indices: list[int]) -> Batch:
        """Read and pack these samples."""
        samples = PackedSamples.of([self.states.read(index) for index in indices], device=self.device)
        argmax = np.concatenate([self.target_argmax[self.starts[i] : self.starts[i + 1]] for i in indices])
        return Batch(samples, torch.from_numpy(argmax.astype(np.int64)).to(self.device))
