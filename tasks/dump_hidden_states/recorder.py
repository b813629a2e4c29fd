"""The states of one server on their way from its forward passes into shards, while it computes the next.

A forward pass of a prefill batch fills one device buffer, slot by slot; behind its last layer the buffer is encoded on
the device, copied on a stream of its own, and handed to threads which write its rows to their place in their shard.
Consecutive samples of a shard that lie side by side in the pass are written as one run: what the threads do in Python
keeps the server from launching its next kernels.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import write_atomically, write_json
from tasks.common.shard import ShardWriter
from tasks.common.storage import StoredRows
from tasks.dump_hidden_states.layer_output import LayerOutput
from tasks.dump_hidden_states.spool import ERROR, FIGURES, Destination, parse_request_id

_WRITERS = 6
# Forward passes whose states may wait in host memory; the server stands still beyond.
_PASSES_AHEAD = 6


@dataclass(frozen=True)
class _Request:
    """Rows of one request in a forward pass."""

    key: str
    index: int
    start: int
    rows: int


@dataclass(frozen=True)
class _Pass:
    """A forward pass on its way to the disk; its tensors may be read once `copied` has happened (None: now)."""

    states: StoredRows
    input_ids: torch.Tensor
    positions: torch.Tensor
    requests: list[_Request]
    copied: Any


@dataclass
class _OpenShard:
    destination: Destination
    writer: ShardWriter
    closing: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Recorder:
    """Takes the slots of a pass in order (`put`), then its last state (`finish`); the first rank's alone writes."""

    def __init__(self, spool: Path, num_aux: int, hidden_size: int, storage_dtype: str, is_first: bool):
        self._spool, self._sizes, self._is_first = spool, (num_aux, hidden_size, storage_dtype), is_first
        self._aux: torch.Tensor | None = None  # of the pass that runs now, [rows, n_aux, H]
        self._filled = 0
        self._form = ""
        self._stream: torch.cuda.Stream | None = None
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="states")
        self._room = threading.BoundedSemaphore(_PASSES_AHEAD)
        self._shards: dict[str, _OpenShard] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._waited_s = 0.0

    def takes(self, batch: Any) -> bool:
        """Whether the pass is one of prefill with a request of ours."""
        return batch.forward_mode.is_extend() and any(parse_request_id(rid) for rid in batch.rids or ())

    def put(self, slot: int, batch: Any, output: LayerOutput) -> None:
        """The output of an aux layer; layers run in the order of their slots."""
        if self._form not in ("", output.form):
            raise DraftlineError(f"slot {slot} came as {output.form}, those before as {self._form}.")
        self._form = output.form
        if not self._is_first:
            return
        state, rows = output.state, sum(batch.extend_seq_lens_cpu)
        if slot == 0:
            self._aux, self._filled = state.new_empty((rows, *self._sizes[:2])), 0
        if self._aux is None or slot != self._filled or state.shape[0] < rows:
            raise DraftlineError(
                f"slot {slot} came with {list(state.shape)} after {self._filled} slots of {rows} rows: the hooks do not see every "
                f"layer of the pass. CUDA graphs must be off for prefill."
            )
        self._aux[:, slot] = state[:rows]
        self._filled += 1

    def finish(self, batch: Any, state: Any) -> None:
        """The last state: the pass is complete, and starts on its way."""
        if not self._is_first:
            return
        if self._error:
            raise self._error
        if self._aux is None or self._filled != self._sizes[0] or not isinstance(state, torch.Tensor):
            raise DraftlineError(
                f"the decoder returned {type(state).__name__} after {self._filled} of {self._sizes[0]} slots: the hooks do not "
                f"see every layer of the pass. Run without pipeline parallelism and without CUDA graphs for prefill."
            )
        aux, self._aux = self._aux, None
        began = time.perf_counter()
        self._room.acquire()
        self._waited_s += time.perf_counter() - began
        states = StoredRows.of(aux, state[: len(aux)], self._sizes[2])
        self._threads.submit(self._write, self._off_the_device(states, batch))

    def _off_the_device(self, states: StoredRows, batch: Any) -> _Pass:
        requests, rows = _requests(batch), len(states)
        ids, positions = batch.input_ids[:rows], batch.positions[:rows]
        if not ids.is_cuda:
            # Buffers of the next pass are these again.
            return _Pass(states.map(torch.clone), ids.clone(), positions.clone(), requests, None)
        self._stream = self._stream or torch.cuda.Stream(ids.device)
        self._stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(self._stream):
            held = _Pass(
                states.map(self._to_host),
                self._to_host(ids),
                self._to_host(positions),
                requests,
                torch.cuda.Event(blocking=True),
            )
            held.copied.record()
        return held

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory may be handed out again once this stream is through
        return host

    def _write(self, held: _Pass) -> None:
        try:
            if held.copied is not None:
                held.copied.synchronize()
            ids, positions = held.input_ids.numpy(), held.positions.numpy()
            for key, start, rows in self._runs(held.requests, positions):
                self._write_run(key, start, held.states[rows], ids[rows], positions[rows])
        except BaseException as error:
            self._fail(error)
        finally:
            self._room.release()

    def _runs(self, requests: list[_Request], positions: np.ndarray) -> Iterator[tuple[str, int, slice]]:
        """Yield (key, first token in the shard, rows of the pass); requests that follow each other in both are one."""
        key, start, first, end = "", 0, 0, 0
        for request in requests:
            offsets = self._open(request.key).destination.plan.offsets
            place = int(offsets[request.index] + positions[request.start])
            if request.key != key or request.start != end or place != start + end - first:
                if key:
                    yield key, start, slice(first, end)
                key, start, first = request.key, place, request.start
            end = request.start + request.rows
        if key:
            yield key, start, slice(first, end)

    def _write_run(self, key: str, start: int, states: StoredRows, ids: np.ndarray, positions: np.ndarray) -> None:
        shard = self._open(key)
        plan = shard.destination.plan
        places = np.arange(start, start + len(ids))
        samples = np.searchsorted(plan.offsets, places, side="right") - 1
        planned = plan.input_ids[start : start + len(ids)]
        if len(planned) < len(ids):
            raise DraftlineError(f"{plan.name}: the server computed rows behind its last sample, {plan.ids[-1]}.")
        wrong = np.flatnonzero((ids != planned) | (positions != places - plan.offsets[samples]))
        if len(wrong):
            row = int(wrong[0])
            raise DraftlineError(
                f"{plan.name}, sample {plan.ids[samples[row]]}: from position {places[row] - plan.offsets[samples[row]]} on the "
                f"server computed other tokens than were planned ({ids[row : row + 5].tolist()}, "
                f"{planned[row : row + 5].tolist()}): rows of the batch are mixed up."
            )
        shard.writer.write(start, states)
        with shard.lock:
            if shard.closing or not shard.writer.is_complete:
                return
            shard.closing = True
        self._threads.submit(self._close, key)

    def _open(self, key: str) -> _OpenShard:
        with self._lock:
            if key not in self._shards:
                destination = Destination.take(self._spool, key)
                writer = ShardWriter(destination.folder, destination.plan, *self._sizes)
                self._shards[key] = _OpenShard(destination, writer.__enter__())
            return self._shards[key]

    def _close(self, key: str) -> None:
        try:
            with self._lock:
                shard = self._shards.pop(key)
                write_json(self._spool / FIGURES, {"waited_s": round(self._waited_s, 3)})
            shard.writer.__exit__(None, None, None)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The next pass raises it, which ends the server; where none comes, the dump reads it."""
        with self._lock:
            self._error = self._error or error
            write_atomically(self._spool / ERROR, f"{type(self._error).__name__}: {self._error}".encode())


def _requests(batch: Any) -> list[_Request]:
    requests, start = [], 0
    for rid, rows in zip(batch.rids, batch.extend_seq_lens_cpu, strict=True):
        if (place := parse_request_id(rid)) and rows:
            requests.append(_Request(*place, start, rows))
        start += rows
    return requests
