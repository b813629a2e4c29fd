"""Hidden states as packed batches, in an order that depends on the seed and the epoch alone."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.packing import PackedSamples
from tasks.common.storage import decode

# A sample as it is stored, and the scales of its aux states and of its last (None but for float8).
StoredSample = tuple[Sample, torch.Tensor | None, torch.Tensor | None]
# Batches that are filled at the same time. More would fill them better and make the last ones of short samples alone.
_OPEN_BATCHES = 64


@dataclass(frozen=True)
class Batch:
    """Packed samples with the target's own next token.

    Attributes:
        target_argmax: argmax of the target's full distribution at each position, int64 [T]; -1 where the
            assistant did not write the next token.
    """

    samples: PackedSamples
    target_argmax: torch.Tensor


@dataclass(frozen=True)
class StoredBatch:
    """The same as it is stored, on the CPU: what travels to the device is as small as on the disk, and is decoded there.

    Attributes:
        aux: [T, n_aux, H] and last [T, H] in the stored type; scales as in `StoredRows`.
    """

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    aux_scale: torch.Tensor | None
    last_scale: torch.Tensor | None
    target_argmax: torch.Tensor

    @classmethod
    def of(cls, stored: list[StoredSample], target_argmax: torch.Tensor) -> "StoredBatch":
        """Lay samples as they are stored end to end."""
        samples, *scales = zip(*stored, strict=True)
        return cls(
            tuple(sample.id for sample in samples),
            tuple(sample.num_tokens for sample in samples),
            *(torch.cat([getattr(s, name) for s in samples]) for name in ("input_ids", "loss_mask", "aux", "last")),
            *(None if of_all[0] is None else torch.cat(of_all) for of_all in scales),
            target_argmax,
        )

    def on(self, device: str) -> Batch:
        """Decoded to float32 on `device`."""

        def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        ends = np.cumsum(self.lengths).tolist()
        samples = PackedSamples(
            sample_ids=self.sample_ids,
            bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)),
            input_ids=self.input_ids.to(device).long(),
            loss_mask=self.loss_mask.to(device).bool(),
            aux=decode(there(self.aux), there(self.aux_scale)).flatten(1).float(),
            last=decode(there(self.last), there(self.last_scale)).float(),
        )
        return Batch(samples, self.target_argmax.to(device).long())


class DraftData(Dataset):
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
        self.starts = np.cumsum([0, *states.tokens])
        supervised = (is_supervised(states.read_tokens(index)[1]) for index in range(len(states)))
        self.usable = np.flatnonzero(np.fromiter(supervised, bool, len(states)))
        if not len(self.usable):
            raise DraftlineError(
                f"{states.folder}: none of the {len(states)} samples has a supervised position (loss mask 1 beyond the second "
                f"token): there is nothing to train on. The mask density of each is in reports/gates/hidden_states.json."
            )

    def batches(self, order: np.ndarray) -> list[list[int]]:
        """Pack samples, taken in this order, into batches of at most `batch_tokens`; a longer sample goes alone."""
        return pack(self.states.tokens, order, self.batch_tokens)

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """Batches of one pass over the split, shuffled by (seed, epoch)."""
        return self.batches(np.random.default_rng((seed, epoch)).permutation(self.usable))

    def read(self, indices: list[int]) -> Batch:
        """Read and pack these samples, on `device`."""
        return self._stored(indices).on(self.device)

    def __getitem__(self, indices: list[int]) -> StoredBatch | DraftlineError:
        """The same as worker processes read it. An error is a value: of one that is raised there a traceback comes back."""
        try:
            return self._stored(indices)
        except DraftlineError as error:
            return error

    def _stored(self, indices: list[int]) -> StoredBatch:
        argmax = np.concatenate([self.target_argmax[self.starts[i] : self.starts[i + 1]] for i in indices])
        return StoredBatch.of([self.states.read_stored(index) for index in indices], torch.from_numpy(argmax))


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


class BatchStream:
    """Batches of one split without end, epoch after epoch; between any two the position can be saved and taken up."""

    def __init__(self, data: DraftData, seed: int, workers: int = 0):
        """
        Args:
            workers: processes that read ahead; 0 reads in this one. The batches are the same.
        """
        self.data, self.seed, self.workers = data, seed, workers
        self.epoch = self.batch = 0

    def __iter__(self) -> Iterator[Batch]:
        asked: deque[tuple[int, int]] = deque()  # positions behind the batches that are being read
        loader = DataLoader(
            self.data,
            batch_size=None,
            sampler=self._indices(asked),
            collate_fn=_as_it_is,
            num_workers=self.workers,
            generator=torch.Generator(),  # else it draws from the global one
        )
        for batch in loader:
            if isinstance(batch, DraftlineError):
                raise batch
            self.epoch, self.batch = asked.popleft()
            yield batch.on(self.data.device)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is."""
        return {"seed": self.seed, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; takes effect with the next `iter`."""
        require_seed(state, self.seed)
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _indices(self, asked: deque[tuple[int, int]]) -> Iterator[list[int]]:
        epoch, batch = self.epoch, self.batch
        while True:
            for indices in self.data.epoch(self.seed, epoch)[batch:]:
                batch += 1
                asked.append((epoch, batch))
                yield indices
            epoch, batch = epoch + 1, 0


def _as_it_is(batch: StoredBatch | DraftlineError) -> StoredBatch | DraftlineError:
    return batch
