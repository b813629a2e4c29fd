"""Batches that are on the GPU before they are wanted: read, pinned and copied by a thread, on a stream of its own."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch

from tasks.train_draft.batch import Batch, BatchForm, StoredBatch

_Tag = TypeVar("_Tag")
# Batches on the device beside the one that is computed.
_AHEAD = 2


def on_device(stored: Iterable[tuple[StoredBatch, _Tag]], form: BatchForm) -> Iterator[tuple[Batch, _Tag]]:
    """Each batch on its device with what came beside it; on a GPU ahead of time, on a CPU when it is asked for.

    An error in `stored` is raised here.
    """
    if torch.device(form.device).type == "cuda":
        yield from _ahead(stored, form)
        return
    for batch, tag in stored:
        yield batch.on(form.device, form.dtype), tag


def _ahead(stored: Iterable[tuple[StoredBatch, _Tag]], form: BatchForm) -> Iterator[tuple[Batch, _Tag]]:
    ready: queue.Queue = queue.Queue(_AHEAD)
    stop, stream = threading.Event(), torch.cuda.Stream(form.device)

    def put(item) -> None:
        waiting = True
        while waiting and not stop.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                waiting = False

    def copy() -> None:
        try:
            with torch.cuda.stream(stream):
                for batch, tag in stored:
                    there = batch.map(torch.Tensor.pin_memory).on(form.device, form.dtype)
                    put((there, tag, stream.record_event()))
                    if stop.is_set():
                        return
            put(None)
        except BaseException as error:  # whatever it is, it belongs to who waits for the batch
            put(error)

    thread = threading.Thread(target=copy, daemon=True, name="prefetch")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batch, tag, copied = item
            current = torch.cuda.current_stream(form.device)
            current.wait_event(copied)
            batch.used_by(current)
            yield batch, tag
    finally:
        stop.set()
        thread.join()
