"""Batches of states that are dumped meanwhile: shards of the ring are read in the order of the plan, and freed."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import Sample
from tasks.common.ring import consume, forget_freed
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import decode
from tasks.train_draft.batch import Batch, BatchForm, StoredBatch, StoredSample
from tasks.train_draft.data import is_supervised, pack, require_seed
from tasks.train_draft.induction import MAX_TOKENS, TrainingStates, without_first_tokens
from tasks.train_draft.processes import Processes
from tasks.train_draft.target_head import TargetHead

_NAMED = 3  # samples, in an error


class RingStream:
    """Batches without end, each of one shard, whose samples are shuffled by (seed, epoch, shard).

    A shard is freed when the step after its last batch begins. What was freed is not seen again in its epoch, so a run that
    is killed goes on with other samples than an uninterrupted one. Of several processes the first one waits for shards,
    has them checked and frees them; the others open what it names.
    """

    def __init__(
        self,
        folder: Path,
        plans: Callable[[], Iterable[ShardPlan]],
        check: Callable[[Path, ShardPlan], None],
        *,
        seed: int,
        batch_tokens: int,
    ):
        """
        Args:
            plans: gives the shards in order, again for each epoch.
            check: the gate; raises where a shard is not sound.
        """
        self.folder, self.seed, self.epoch = folder, seed, 0
        self._plans, self._check = plans, check
        self._batch_tokens = batch_tokens
        self._shards = self._consume()
        self._first: tuple[ShardPlan, StoredShard] | None = None
        self._head: TargetHead | None = None
        self._form: BatchForm | None = None
        self._processes: Processes | None = None
        self._step_batches, self._trained = 1, 0

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

    def shared(self, head: TargetHead, form: BatchForm, processes: Processes, step_batches: int) -> "RingStream":
        """Take the target's greedy tokens from `head`, a sample at a time; give batches `form`.

        Args:
            step_batches: of one optimiser step, over all processes.
        """
        self._head, self._form, self._processes, self._step_batches = head, form, processes, step_batches
        return self

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        while True:
            of_step = list(islice(batches, self._step_batches))
            for plan, shard, indices in of_step[self._processes.rank :: self._processes.size]:
                stored = [_stored_sample(plan, shard, index) for index in indices]
                greedy = [self._head.greedy(s.loss_mask, decode(s.last, last_scale)) for s, _, last_scale in stored]
                batch = StoredBatch.of(stored, torch.cat(greedy), self._form)
                yield batch.on(self._form.device, self._form.dtype)

    def _batches(self) -> Iterator[tuple[ShardPlan, StoredShard, list[int]]]:
        """Every batch, whoever's, as indices into its shard."""
        while True:
            plan, shard = self._first or next(self._shards)
            self._first = None
            bounds = zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True)
            usable = [index for index, (start, end) in enumerate(bounds) if is_supervised(plan.loss_mask[start:end])]
            number = int(plan.name.rpartition("-")[2])
            order = np.random.default_rng((self.seed, self.epoch, number)).permutation(usable).astype(int)
            self._trained += len(usable)
            for indices in pack(np.diff(plan.offsets), order, self._batch_tokens):
                yield plan, shard, indices

    def state_dict(self) -> dict[str, Any]:
        """The shards themselves say where the next batch is."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch of `state_dict`; once, in a new stream, which may have found the epoch at its end already."""
        require_seed(state, self.seed)
        self.epoch += state["epoch"]

    def _consume(self) -> Iterator[tuple[ShardPlan, StoredShard]]:
        while True:
            seen: list[str] = []
            self._trained = 0
            for plan, shard in self._of_epoch():
                seen += plan.ids[: _NAMED - len(seen)]
                yield plan, shard
            if seen and not self._trained:
                raise DraftlineError(
                    f"{self.folder}: a whole epoch without a batch: no sample ({', '.join(seen)}, ...) has a supervised position, "
                    f"loss mask 1 beyond the second token. A chat template without generation tags is the usual cause."
                )
            self.epoch += 1
            if self._processes.is_first:
                forget_freed(self.folder)
                print(
                    f"{self.folder}: every shard was trained on; waiting for epoch {self.epoch}: start the dump again, "
                    f"`python -m tasks.dump_hidden_states`.",
                    flush=True,
                )

    def _of_epoch(self) -> Iterator[tuple[ShardPlan, StoredShard]]:
        if self._processes.is_first:
            for plan, shard in consume(self.folder, self._plans(), self._check):
                self._processes.of_first(plan.name)
                self._processes.wait()  # until all have opened it: it is freed when the next one is asked for
                yield plan, shard
            self._processes.of_first(None)
            return
        plans = iter(self._plans())
        while (name := self._processes.of_first(None)) is not None:
            plan = next(plan for plan in plans if plan.name == name)
            shard = StoredShard(self.folder / f"{name}.safetensors")
            self._processes.wait()
            yield plan, shard


def _stored_sample(plan: ShardPlan, shard: StoredShard, index: int) -> StoredSample:
    rows = slice(*plan.offsets[index : index + 2].tolist())
    fields = (shard.input_ids, shard.loss_mask, shard.aux, shard.last, shard.aux_scale, shard.last_scale)
    *values, aux_scale, last_scale = (None if field is None else field[rows] for field in fields)
    return Sample(plan.ids[index], *values), aux_scale, last_scale
