"""Hidden states as packed batches, in an order that depends on the seed and the epoch alone."""

import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates
from tasks.train_draft.batch import Batch, BatchForm, StoredBatch
from tasks.train_draft.prefetch import on_device

# Batches that are filled at the same time. More would fill them better and make the last ones of short samples alone.
_OPEN_BATCHES = 64


class DraftData(Dataset):
    """The samples of one split that supervise something; states are read with their batch, never all at once."""

    def __init__(self, states: HiddenStates, target_argmax: np.ndarray, batch_tokens: int, form: BatchForm):
        """
        Args:
            target_argmax: int32 over the tokens of the split, in its order (see `cache_target_argmax`).

        Raises:
            DraftlineError: no sample has a supervised position.
        """
        self.states, self.batch_tokens, self.form = states, batch_tokens, form
        self.target_argmax = target_argmax
        self.starts = np.cumsum([0, *states.tokens])
        supervised = (is_supervised(states.read_tokens(index)[1]) for index in range(len(states)))
        self.usable = np.flatnonzero(np.fromiter(supervised, bool, len(states)))
        if not len(self.usable):
            raise DraftlineError(
                f"{states.folder}: none of the {len(states)} samples ({', '.join(states.ids[:3])}, ...) has a supervised position "
                f"(loss mask 1 beyond the second token): there is nothing to train on. The mask density of each is in "
                f"reports/gates/hidden_states.json; a chat template without generation tags is the usual cause."
            )

    def batches(self, order: np.ndarray) -> list[list[int]]:
        """Pack samples, taken in this order, into batches of at most `batch_tokens`; a longer sample goes alone."""
        return pack(self.states.tokens, order, self.batch_tokens)

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """Batches of one pass over the split, shuffled by (seed, epoch)."""
        return self.batches(np.random.default_rng((seed, epoch)).permutation(self.usable))

    def read(self, indices: list[int]) -> Batch:
        """Read and pack these samples, on their device."""
        return self._stored(indices).on(self.form.device, self.form.dtype)

    def __getitem__(self, indices: list[int]) -> StoredBatch | DraftlineError:
        """The same as worker processes read it. An error is a value: of one that is raised there a traceback comes back."""
        try:
            return self._stored(indices)
        except DraftlineError as error:
            return error

    def _stored(self, indices: list[int]) -> StoredBatch:
        argmax = np.concatenate([self.target_argmax[self.starts[i] : self.starts[i + 1]] for i in indices])
        stored = [self.states.read_stored(index) for index in indices]
        return StoredBatch.of(stored, torch.from_numpy(argmax), self.form)


def is_supervised(loss_mask: torch.Tensor | np.ndarray) -> bool:
    """Whether a sample gives a loss: the draft predicts from the third token on, and only what the assistant wrote."""
    return bool(loss_mask[2:].any())


def require_seed(position: dict[str, Any], seed: int) -> None:
    """
    Raises:
        DraftlineError: a stream's saved position is of an order with another seed.
    """
    if position["seed"] != seed:
        raise DraftlineError(f"the position is of an order with seed {position['seed']}, this one has seed {seed}.")


def pack(tokens: np.ndarray, order: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Batches of whole samples, best fit: a sample goes where it leaves the least room.

    Args:
        tokens: of every sample, int [samples].
        order: indices of the samples to pack, in the order in which they are taken.
    """
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of the open batches: (tokens left, number), ascending
    for index in order.tolist():
        needed = int(tokens[index])
        place = bisect_left(rooms, (needed, -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = batch_tokens, len(batches)
            batches.append([])
            if len(rooms) == _OPEN_BATCHES:
                rooms.pop(0)
        batches[number].append(index)
        if room > needed:
            insort(rooms, (room - needed, number))
    return batches


@dataclass(frozen=True)
class Share:
    """This process's batches of an optimiser step: of each `of` in a row every `processes`-th, from the `rank`-th on."""

    rank: int = 0
    processes: int = 1
    of: int = 1


class BatchStream:
    """Batches of one split without end, epoch after epoch; between any two steps the position can be saved and taken up.

    The position says nothing of `share`: another number of processes goes on with the same steps.
    """

    def __init__(self, data: DraftData, seed: int, workers: int = 0, share: Share = Share()):
        """
        Args:
            workers: processes that read ahead; 0 reads in this one. The batches are the same.
        """
        self.data, self.seed, self.workers, self.share = data, seed, workers, share
        self.epoch = self.batch = 0

    def __iter__(self) -> Iterator[Batch]:
        asked: deque[tuple[int, int]] = deque()  # positions behind the batches that are being read
        loader = DataLoader(
            self.data,
            batch_size=None,
            sampler=self._indices(asked),
            collate_fn=_as_it_is,
            num_workers=self.workers,
            worker_init_fn=_leave_group,
            generator=torch.Generator(),  # else it draws from the global one
        )
        placed = ((_read(batch), asked.popleft()) for batch in loader)
        for batch, position in on_device(placed, self.data.form):
            self.epoch, self.batch = position
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is."""
        return {"seed": self.seed, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; takes effect with the next `iter`."""
        require_seed(state, self.seed)
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _indices(self, asked: deque[tuple[int, int]]) -> Iterator[list[int]]:
        batches, share = self._batches(), self.share
        while True:
            of_step = list(islice(batches, share.of))
            for indices, _ in of_step[share.rank :: share.processes]:
                asked.append(of_step[-1][1])
                yield indices

    def _batches(self) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Every batch from the position on, whoever's, with the position behind it."""
        epoch, batch = self.epoch, self.batch
        while True:
            for indices in self.data.epoch(self.seed, epoch)[batch:]:
                batch += 1
                yield indices, (epoch, batch)
            epoch, batch = epoch + 1, 0


def _leave_group(worker: int) -> None:
    """A signal to the trainer's process group must not end its readers while it finishes a step; the trainer ends them."""
    os.setpgid(0, 0)


def _read(batch: StoredBatch | DraftlineError) -> StoredBatch:
    if isinstance(batch, DraftlineError):
        raise batch
    return batch


def _as_it_is(batch: StoredBatch | DraftlineError) -> StoredBatch | DraftlineError:
    return batch
