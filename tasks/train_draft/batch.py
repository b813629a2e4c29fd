"""A packed batch as it is stored, and as a step computes it on its device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from tasks.common.hidden_states import Sample
from tasks.common.kernels import compiles_on
from tasks.common.packing import PackedSamples, TttInputs
from tasks.common.rows import BLOCK, round_up
from tasks.common.storage import decode
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.loss import Lessons

# A sample as it is stored, and the scales of its aux states and of its last (None but for float8).
StoredSample = tuple[Sample, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class BatchForm:
    """What a step wants of its batches.

    Attributes:
        dtype: that it computes in.
        num_steps: TTT steps K.
        draft_ids: draft id of each target id, -1 where it has none; int64 [V].
        batch_tokens: where kernels are compiled, the token axis is padded to this, so that one compilation serves every
            batch; a longer sample to a multiple of it.
    """

    device: str
    dtype: torch.dtype
    num_steps: int
    draft_ids: torch.Tensor
    batch_tokens: int

    @classmethod
    def of(cls, vocab_map: VocabMap, device: str, dtype: torch.dtype, num_steps: int, batch_tokens: int) -> "BatchForm":
        return cls(device, dtype, num_steps, vocab_map.draft_ids, batch_tokens)

    @property
    def reads_into_pinned_memory(self) -> bool:
        """Whether a batch is laid out where a GPU copies it from; a worker process has no part in the GPU."""
        return torch.device(self.device).type == "cuda" and get_worker_info() is None

    def padding(self, num_tokens: int) -> int:
        """Tokens to add to a batch of so many."""
        if not compiles_on(self.device):
            return 0
        return round_up(round_up(num_tokens, self.batch_tokens), BLOCK) - num_tokens


@dataclass(frozen=True)
class Batch:
    """Packed samples on a device, and what the steps read and learn there.

    Attributes:
        num_tokens: of the samples; the padding behind them not counted.
        target_argmax: argmax of the target's full distribution at each position, int64 [T]; -1 where the
            assistant did not write the next token.
    """

    samples: PackedSamples
    num_tokens: int
    target_argmax: torch.Tensor
    inputs: TttInputs
    lessons: Lessons

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """`function` of every tensor, in an order that is always the same."""
        return replace(
            self,
            samples=self.samples.map(function),
            target_argmax=function(self.target_argmax),
            inputs=self.inputs.map(function),
            lessons=self.lessons.map(function),
        )

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being given to another batch while `stream` still reads it."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        self.map(keep)


@dataclass(frozen=True)
class StoredBatch:
    """The same as it is stored, on the CPU: what travels to the device is as small as on the disk, and is decoded there.

    Attributes:
        samples: with aux [T, n_aux, H] and last [T, H] in the stored type; scales as in `StoredRows`.
    """

    samples: PackedSamples
    aux_scale: torch.Tensor | None
    last_scale: torch.Tensor | None
    num_tokens: int
    target_argmax: torch.Tensor
    inputs: TttInputs
    lessons: Lessons

    @classmethod
    def of(cls, stored: list[StoredSample], target_argmax: torch.Tensor, form: BatchForm) -> "StoredBatch":
        """Lay samples as they are stored end to end.

        Args:
            target_argmax: as in `Batch`, without padding.
        """
        samples, *scales = zip(*stored, strict=True)
        ends = np.cumsum([sample.num_tokens for sample in samples]).tolist()
        bounds, missing = list(zip([0, *ends[:-1]], ends, strict=True)), form.padding(ends[-1])
        if missing:
            bounds.append((ends[-1], ends[-1] + missing))

        def packed(tensors, value: int = 0) -> torch.Tensor:
            parts = list(tensors)
            shape = (ends[-1] + missing, *parts[0].shape[1:])
            whole = torch.empty(shape, dtype=parts[0].dtype, pin_memory=form.reads_into_pinned_memory)
            torch.cat(parts, out=whole[: ends[-1]])
            whole[ends[-1] :] = value
            return whole

        whole = PackedSamples(
            sample_ids=tuple(sample.id for sample in samples),
            bounds=tuple(bounds),
            input_ids=packed(sample.input_ids for sample in samples).long(),
            loss_mask=packed(sample.loss_mask for sample in samples).bool(),
            aux=packed(sample.aux for sample in samples),
            last=packed(sample.last for sample in samples),
        )
        argmax = F.pad(target_argmax.long(), (0, missing), value=-1)
        labels = torch.where(argmax >= 0, form.draft_ids[argmax], -1)
        inputs = TttInputs.of(whole, form.num_steps, form.device)
        return cls(
            whole,
            *(None if of_all[0] is None else packed(of_all, 1) for of_all in scales),
            ends[-1],
            argmax,
            inputs,
            Lessons.of(whole, inputs, labels, form.device),
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StoredBatch":
        """`function` of every tensor."""
        scales = {
            name: None if scale is None else function(scale)
            for name, scale in (("aux_scale", self.aux_scale), ("last_scale", self.last_scale))
        }
        return replace(
            self,
            samples=self.samples.map(function),
            target_argmax=function(self.target_argmax),
            inputs=self.inputs.map(function),
            lessons=self.lessons.map(function),
            **scales,
        )

    def on(self, device: str, dtype: torch.dtype) -> Batch:
        """Decoded to `dtype` on `device`; from pinned memory nothing waits for the copy."""
        there = self.map(lambda tensor: tensor.to(device, non_blocking=True))
        samples = replace(
            there.samples,
            aux=decode(there.samples.aux, there.aux_scale).flatten(1).to(dtype),
            last=decode(there.samples.last, there.last_scale).to(dtype),
        )
        return Batch(samples, self.num_tokens, there.target_argmax, there.inputs, there.lessons)
