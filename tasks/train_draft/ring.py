"""Batches of states that are dumped meanwhile: shards of the ring are read in the order of the plan, and freed."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.hidden_states import Sample
from tasks.common.packing import PackedSamples
from tasks.common.ring import consume, forget_freed
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import decode
from tasks.train_draft.data import Batch, StoredBatch, StoredSample, is_supervised, pack, require_seed
from tasks.train_draft.induction import MAX_TOKENS, TrainingStates, without_first_tokens
from tasks.train_draft.target_head import TargetHead


class RingStream:
    """Batches without end, each of one shard, whose samples are shuffled by (seed, epoch, shard).

    A shard is freed when its last batch was trained on. What was freed is not seen again in its epoch, so a run that is
    killed goes on with other samples than an uninterrupted one.
    """

    def __init__(
        self,
        folder: Path,
        plans: Callable[[], Iterable[ShardPlan]],
        check: Callable[[Path, ShardPlan], None],
        *,
        seed: int,
        batch_tokens: int,
        device: str,
    ):
        """
        Args:
            plans: gives the shards in order, again for each epoch.
            check: the gate; raises where a shard is not sound.
        """
        self.folder, self.seed, self.epoch = folder, seed, 0
        self._plans, self._check = plans, check
        self._batch_tokens, self._device = batch_tokens, device
        self._shards = self._consume()
        self._first: tuple[ShardPlan, StoredShard] | None = None
        self._head: TargetHead | None = None

    def first_states(self) -> TrainingStates:
        """Of the first shard that is not freed, about `MAX_TOKENS` tokens at most; it is trained on all the same."""
        self._first = self._first or next(self._shards)
        plan, shard = self._first
        samples, tokens = [], 0
        for index in range(len(plan.ids)):
            sample, aux_scale, last_scale = _stored_sample(plan, shard, index)
            aux, last = decode(sample.aux, aux_scale), decode(sample.last, last_scale)
            samples.append(Sample(sample.id, sample.input_ids, sample.loss_mask, aux, last))
            tokens += sample.num_tokens
            if tokens >= MAX_TOKENS:
                break
        return without_first_tokens(samples)

    def with_targets_of(self, head: TargetHead) -> "RingStream":
        """Take the target's greedy tokens from `head`, a batch at a time."""
        self._head = head
        return self

    def __iter__(self) -> Iterator[Batch]:
        while True:
            plan, shard = self._first or next(self._shards)
            self._first = None
            bounds = zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True)
            usable = [index for index, (start, end) in enumerate(bounds) if is_supervised(plan.loss_mask[start:end])]
            number = int(plan.name.rpartition("-")[2])
            order = np.random.default_rng((self.seed, self.epoch, number)).permutation(usable).astype(int)
            for indices in pack(np.diff(plan.offsets), order, self._batch_tokens):
                stored = [_stored_sample(plan, shard, index) for index in indices]
                tokens = sum(sample.num_tokens for sample, _, _ in stored)
                samples = StoredBatch.of(stored, torch.full((tokens,), -1)).on(self._device).samples
                yield Batch(samples, target_argmax(samples, self._head))

    def state_dict(self) -> dict[str, Any]:
        """The shards themselves say where the next batch is."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch of `state_dict`; once, in a new stream, which may have found the epoch at its end already."""
        require_seed(state, self.seed)
        self.epoch += state["epoch"]

    def _consume(self) -> Iterator[tuple[ShardPlan, StoredShard]]:
        while True:
            yield from consume(self.folder, self._plans(), self._check)
            forget_freed(self.folder)
            self.epoch += 1
            print(
                f"{self.folder}: every shard was trained on; waiting for epoch {self.epoch}: start the dump again, "
                f"`python -m tasks.dump_hidden_states`.",
                flush=True,
            )


@torch.no_grad()
def target_argmax(samples: PackedSamples, head: TargetHead) -> torch.Tensor:
    """The target's greedy token at each position that predicts one of the assistant's, -1 elsewhere: int64 [T]."""
    place = torch.arange(samples.num_tokens, device=samples.input_ids.device)
    predicts = (place + 1 < samples.ends) & samples.loss_mask[samples.ahead(1)]
    argmax = torch.full_like(samples.input_ids, -1)
    if predicts.any():
        argmax[predicts] = head.argmax(samples.last[predicts].to(head.lm_head.dtype))
    return argmax


def _stored_sample(plan: ShardPlan, shard: StoredShard, index: int) -> StoredSample:
    rows = slice(*plan.offsets[index : index + 2].tolist())
    fields = (shard.input_ids, shard.loss_mask, shard.aux, shard.last, shard.aux_scale, shard.last_scale)
    *values, aux_scale, last_scale = (None if field is None else field[rows] for field in fields)
    return Sample(plan.ids[index], *values), aux_scale, last_scale
