"""Several samples on one token axis: what the draft is run over, without a padded position."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tasks.common.hidden_states import Sample


@dataclass(frozen=True)
class PackedSamples:
    """Samples laid end to end, T tokens in all.

    Attributes:
        sample_ids: in order.
        bounds: [start, end) of each sample on the token axis.
        input_ids: int64 [T].
        loss_mask: bool [T], true where the assistant wrote the token.
        aux: [T, n_aux * H], the slots of a token side by side in layer order.
        last: [T, H], the target's final state.
    """

    sample_ids: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "PackedSamples":
        """Lay samples end to end, states as float32."""
        ends = torch.tensor([sample.num_tokens for sample in samples]).cumsum(0).tolist()
        return cls(
            sample_ids=tuple(sample.id for sample in samples),
            bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)),
            input_ids=torch.cat([sample.input_ids for sample in samples]).long(),
            loss_mask=torch.cat([sample.loss_mask for sample in samples]).bool(),
            aux=torch.cat([sample.aux.flatten(1) for sample in samples]).float(),
            last=torch.cat([sample.last for sample in samples]).float(),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token within its sample, int64 [T]."""
        return torch.cat([torch.arange(end - start) for start, end in self.bounds]).to(self.input_ids.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """End of the sample that each token belongs to, int64 [T]."""
        lengths = torch.tensor([end - start for start, end in self.bounds])
        ends = torch.tensor([end for _, end in self.bounds])
        return ends.repeat_interleave(lengths).to(self.input_ids.device)

    def ahead(self, distance: int) -> torch.Tensor:
        """Index of the token `distance` after each, int64 [T]; held at the end of its sample."""
        index = torch.arange(self.num_tokens, device=self.input_ids.device) + distance
        return torch.minimum(index, self.ends - 1)

    def supervised(self, step: int) -> torch.Tensor:
        """Where step i is supervised: the token it predicts, t + 2 + i, is the assistant's and in the sample; bool [T]."""
        exists = torch.arange(self.num_tokens, device=self.input_ids.device) + 2 + step < self.ends
        return exists & self.loss_mask[self.ahead(2 + step)]

    def rows(self, num_steps: int) -> list[torch.Tensor]:
        """Positions that each step must compute: those supervised at this step or a later one.

        Returns:
            for each of `num_steps` steps an ascending int64 [n]; each contains the next.
        """
        needed = torch.zeros_like(self.loss_mask)
        rows: list[torch.Tensor] = []
        for step in reversed(range(num_steps)):
            needed = needed | self.supervised(step)
            rows.insert(0, needed.nonzero().squeeze(1))
        return rows
