"""Hooks that SGLang calls in its scheduler process: they write the states that it computes, while it computes the next.

`--forward-hooks` attaches `layer_hook` to each aux layer and `last_hook` to the decoder (states_plan.py). A forward pass
of a prefill batch fills one device buffer, slot by slot; behind its last layer the buffer is encoded on the device,
copied on a stream of its own, and handed to threads which write each request's rows to their place in their shard.

What a layer returns depends on the release, and is never guessed:

    0.5.16    a pair (hidden, residual), whose sum is the layer's output
    0.5.23    one value, of which the layer's boundary makes the output: `attn_boundary.capture_output`

Under tensor parallelism every rank runs the hooks, since the second form may sum over ranks; the first rank writes.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import write_atomically
from tasks.common.shard import ShardWriter
from tasks.common.storage import StoredRows
from tasks.dump_hidden_states.spool import ERROR, FIGURES, Destination, parse_request_id

_WRITERS = 6
# Forward passes whose states may wait in host memory; the server stands still beyond.
_PASSES_AHEAD = 6

_recorders: dict[str, "Recorder"] = {}


def layer_hook(config: dict[str, Any]) -> Callable:
    """A hook for the decoder layer whose output is slot `config["slot"]`."""
    return _recorder(config).layer(config["slot"])


def last_hook(config: dict[str, Any]) -> Callable:
    """A hook for the decoder, whose output is the last state after the final norm."""
    return _recorder(config).last


def _recorder(config: dict[str, Any]) -> "Recorder":
    if config["spool"] not in _recorders:
        sizes = config["num_aux"], config["hidden_size"], config["storage_dtype"]
        _recorders[config["spool"]] = Recorder(Path(config["spool"]), *sizes, is_first=_is_first_rank())
    return _recorders[config["spool"]]


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


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
    """The states of one server on their way from its forward passes into shards."""

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
        self._tokens = 0

    def layer(self, slot: int) -> Callable:
        """The hook of an aux layer; layers run in the order of their slots."""

        def hook(layer: torch.nn.Module, args: tuple, output: Any) -> Any:
            batch = _forward_batch(args)
            rows = _prefill_rows(batch)
            if not rows:
                return None
            returned, state = self._output(layer, batch, output)
            if self._is_first:
                if slot == 0:
                    self._aux, self._filled = state.new_empty((rows, *self._sizes[:2])), 0
                if self._aux is None or slot != self._filled or state.shape[0] < rows:
                    raise DraftlineError(
                        f"slot {slot} came with {list(state.shape)} after {self._filled} slots of {rows} rows: the hooks do not see "
                        f"every layer of the pass. CUDA graphs must be off for prefill."
                    )
                self._aux[:, slot] = state[:rows]
                self._filled += 1
            return returned

        return hook

    def last(self, _decoder: torch.nn.Module, args: tuple, output: Any) -> None:
        """The hook of the decoder: the pass is complete."""
        batch = _forward_batch(args)
        rows = _prefill_rows(batch)
        if not rows or not self._is_first:
            return
        if self._error:
            raise self._error
        state = output[0] if isinstance(output, tuple) else output
        if self._aux is None or self._filled != self._sizes[0] or not isinstance(state, torch.Tensor):
            raise DraftlineError(
                f"the decoder returned {type(state).__name__} after {self._filled} of {self._sizes[0]} slots: the hooks do not "
                f"see every layer of the pass. Run without pipeline parallelism and without CUDA graphs for prefill."
            )
        aux, self._aux = self._aux, None
        began = time.perf_counter()
        self._room.acquire()
        self._waited_s += time.perf_counter() - began
        self._tokens += rows
        states = StoredRows.of(aux, state[:rows], self._sizes[2])
        self._threads.submit(self._write, self._off_the_device(states, batch, rows))

    def _output(self, layer: torch.nn.Module, batch: Any, output: Any) -> tuple[Any, torch.Tensor]:
        """What the layer must return in place of `output` (None: the same), and its output with the residual added."""
        pair = isinstance(output, tuple) and [isinstance(part, torch.Tensor) for part in output] == [True, True]
        boundary = getattr(layer, "attn_boundary", None)
        if pair and output[0].shape == output[1].shape:
            if getattr(output[0], "_sglang_needs_allreduce_fusion", False):
                raise DraftlineError(
                    f"{type(layer).__name__} returned a part of its output: its sum over ranks is fused into the next layer. Add "
                    f"--enforce-disable-flashinfer-allreduce-fusion to serve.extra_args."
                )
            form = "a pair of hidden state and residual"
            found = None, output[0] + output[1]
        elif getattr(batch, "residual_stream", None) is not None and hasattr(boundary, "capture_output"):
            form = "a value of the residual stream"
            found = boundary.capture_output(output, batch)
        else:
            raise DraftlineError(
                f"{type(layer).__name__} returned {_describe(output)}: neither SGLang 0.5.16's pair of hidden state and residual "
                f"nor 0.5.23's value of a residual stream. The output of this layer cannot be told: use dump.engine: "
                f"transformers."
            )
        if self._form not in ("", form):
            raise DraftlineError(f"{type(layer).__name__} returned {form}, before it was {self._form}.")
        self._form = form
        return found

    def _off_the_device(self, states: StoredRows, batch: Any, rows: int) -> _Pass:
        requests = _requests(batch)
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
            for request in held.requests:
                rows = slice(request.start, request.start + request.rows)
                self._write_request(request, held.states[rows], ids[rows], positions[rows])
        except BaseException as error:
            self._fail(error)
        finally:
            self._room.release()

    def _write_request(self, request: _Request, states: StoredRows, ids: np.ndarray, positions: np.ndarray) -> None:
        shard = self._open(request.key)
        plan = shard.destination.plan
        start = int(plan.offsets[request.index] + positions[0])
        planned = plan.input_ids[start : start + request.rows]
        if not (np.array_equal(ids, planned) and (np.diff(positions) == 1).all()):
            raise DraftlineError(
                f"{plan.name}, sample {plan.ids[request.index]}: from position {positions[0]} on the server computed other tokens "
                f"than were planned ({ids[:5].tolist()}, {planned[:5].tolist()}): rows of the batch are mixed up."
            )
        shard.writer.write(start, states)
        with shard.lock:
            if shard.closing or not shard.writer.is_complete:
                return
            shard.closing = True
        self._threads.submit(self._close, request.key)

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
                figures = {"tokens": self._tokens, "waited_s": round(self._waited_s, 3)}
                write_atomically(self._spool / FIGURES, json.dumps(figures).encode())
            shard.writer.__exit__(None, None, None)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The next pass raises it, which ends the server; where none comes, the dump reads it."""
        self._error = error
        (self._spool / ERROR).write_text(f"{type(error).__name__}: {error}")


def _forward_batch(args: tuple) -> Any:
    batch = next((arg for arg in args if hasattr(arg, "forward_mode") and hasattr(arg, "extend_seq_lens_cpu")), None)
    if batch is None:
        raise DraftlineError(
            f"a hooked module was called with {[type(arg).__name__ for arg in args]}: no ForwardBatch among them, so its rows "
            f"belong to nobody. This release of SGLang passes it otherwise: use dump.engine: transformers."
        )
    return batch


def _prefill_rows(batch: Any) -> int:
    """Rows of a prefill pass with a request of ours; 0 for any other pass."""
    if not batch.forward_mode.is_extend() or not any(parse_request_id(rid) for rid in batch.rids or ()):
        return 0
    return sum(batch.extend_seq_lens_cpu)


def _requests(batch: Any) -> list[_Request]:
    requests, start = [], 0
    for rid, rows in zip(batch.rids, batch.extend_seq_lens_cpu, strict=True):
        if (place := parse_request_id(rid)) and rows:
            requests.append(_Request(*place, start, rows))
        start += rows
    return requests


def _describe(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"{len(output)} values: {', '.join(map(_describe, output))}"
    return (
        f"{type(output).__name__} {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
    )
