"""Batches that are on the GPU before they are wanted: read, pinned and copied by a thread, on a stream of its own."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch

from tasks.train_draft.batch import Batch, BatchForm, StoredBatch

_Item, _Tag = TypeVar("_Item"), TypeVar("_Tag")
# Batches on the device beside the one that is computed.
_AHEAD = 2


def on_device(stored: Iterable[tuple[StoredBatch, _Tag]], form: BatchForm) -> Iterator[tuple[Batch, _Tag]]:
    """Each batch on its device with what came beside it; on a GPU ahead of time, on a CPU when it is asked for.

    An error in `stored` is raised here.
    """
    if torch.device(form.device).type != "cuda":
        for batch, tag in stored:
            yield batch.on(form.device, form.dtype), tag
        return
    stream = torch.cuda.Stream(form.device)
    for batch, tag, copied in ahead(_copied(stored, form, stream)):
        current = torch.cuda.current_stream(form.device)
        current.wait_event(copied)
        batch.used_by(current)
        yield batch, tag


def _copied(stored, form: BatchForm, stream) -> Iterator[tuple[Batch, _Tag, "torch.cuda.Event"]]:
    for batch, tag in stored:
        pinned = batch.map(torch.Tensor.pin_memory)
        with torch.cuda.stream(stream):
            there = pinned.on(form.device, form.dtype)
        yield there, tag, stream.record_event()


def ahead(items: Iterable[_Item], count: int = _AHEAD) -> Iterator[_Item]:
    """The same items, made by a thread that is up to `count` of them ahead; what it raises is raised here, in its turn."""
    ready: queue.Queue[Callable[[], _Item]] = queue.Queue(count)
    stop = threading.Event()

    def put(give: Callable[[], _Item]) -> None:
        waiting = True
        while waiting and not stop.is_set():
            with suppress(queue.Full):
                ready.put(give, timeout=0.1)
                waiting = False

    def make() -> None:
        try:
            for item in items:
                put(lambda item=item: item)
                if stop.is_set():
                    return
            put(lambda: _raise(_Ended()))
        except BaseException as error:  # whatever it is, it belongs to who waits for the item
            put(lambda error=error: _raise(error))

    thread = threading.Thread(target=make, daemon=True, name="prefetch")
    thread.start()
    try:
        with suppress(_Ended):
            while True:
                yield ready.get()()
    finally:
        stop.set()
        thread.join()


class _Ended(Exception):
    pass


def _raise(error: BaseException):
    raise error
