"""Several samples on one token axis: what the draft is run over, without a padded position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tasks.common.hidden_states import Sample
from tasks.common.rows import Rows


@dataclass(frozen=True)
class PackedSamples:
    """Samples laid end to end, T tokens in all.

    Attributes:
        sample_ids: in order.
        bounds: [start, end) of each sample on the token axis, and of the padding behind them where there is some: to all
            that is computed it is one more sample, of which the assistant wrote nothing.
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

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PackedSamples":
        """`function` of every tensor: to a device, into pinned memory."""
        tensors = (function(getattr(self, name)) for name in ("input_ids", "loss_mask", "aux", "last"))
        return PackedSamples(self.sample_ids, self.bounds, *tensors)

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

    def unrolled(self, num_steps: int) -> torch.Tensor:
        """Positions at which chains are run, ascending int64 [n]: those supervised at one of `num_steps` steps or more."""
        return torch.stack([self.supervised(step) for step in range(num_steps)]).any(0).nonzero().squeeze(1)


@dataclass(frozen=True)
class TttInputs:
    """What K teacher-forced steps read, apart from the states.

    Attributes:
        rows: R places at which every step is run.
        positions: of each token within its sample, int64 [T].
        next_ids: token after each, which step 0 reads, int64 [T].
        read_ids: token that each step reads at the rows, int64 [K, R].
    """

    rows: Rows
    positions: torch.Tensor
    next_ids: torch.Tensor
    read_ids: torch.Tensor

    @classmethod
    def of(cls, samples: PackedSamples, num_steps: int, device: torch.device | str) -> "TttInputs":
        """For samples on the CPU, in the form that `device` computes."""
        rows = Rows.of(samples.unrolled(num_steps), samples.bounds, device)
        read = [samples.input_ids[samples.ahead(1 + step)[rows.index]] for step in range(num_steps)]
        return cls(rows, samples.positions, samples.input_ids[samples.ahead(1)], torch.stack(read))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TttInputs":
        """`function` of every tensor: to a device, into pinned memory."""
        return TttInputs(
            self.rows.map(function), function(self.positions), function(self.next_ids), function(self.read_ids)
        )
