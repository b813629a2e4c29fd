"""A trace of SGLang's profiler, read down to what a step is taken apart by: the engine's own spans, kernels, waits.

SGLang 0.5.16 to 0.5.23 name the stages of their scheduler with spans (`scheduler.run_batch`, `draft`,
`step[TARGET_VERIFY bs=4]`, ...) that are in the trace with and without Python stacks. A kernel's host time is that of the
CUDA call that launched it, found by correlation id; all kernels of a CUDA graph have the id of their cudaGraphLaunch.
"""

import gzip
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.errors import DraftlineError

RUN_BATCH = "scheduler.run_batch"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Span:
    """A stretch of time; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Kernel:
    """Work of the GPU; microseconds.

    Attributes:
        launched: when the host made the call that launched it.
    """

    launched: float
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What one scheduler process did, in the order of time.

    Attributes:
        spans: the engine's own, of the scheduler's thread.
        kernels: kernels, copies and fills, by launch; none on a CPU.
        waits: calls in which the scheduler's thread waited for the GPU.
    """

    path: Path
    spans: tuple[Span, ...]
    kernels: tuple[Kernel, ...]
    waits: tuple[Span, ...]

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """
        Raises:
            DraftlineError: it is no whole trace of an SGLang scheduler.
        """
        try:
            with gzip.open(path) as file:
                return cls._of(path, json.load(file)["traceEvents"])
        except OSError as error:
            raise DraftlineError(f"{path}: cannot be read as a gzipped trace: {error}.") from None
        except (EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DraftlineError(
                f"{path}: not a whole trace of torch's profiler ({type(error).__name__}: {error}). Looked for gzipped JSON with "
                f"`traceEvents`, each with name, cat, ts, dur, and a correlation id where the GPU ran; profile again."
            ) from None

    @classmethod
    def _of(cls, path: Path, recorded: list[dict[str, Any]]) -> "Trace":
        events = [event for event in recorded if event.get("ph") == "X"]
        threads = {_thread(event) for event in events if event["name"] == RUN_BATCH and _is_span(event)}
        if len(threads) != 1:
            raise DraftlineError(
                f"{path}: not the trace of one SGLang scheduler: looked for the spans {RUN_BATCH!r} of one thread, found "
                f"{len(threads)} threads with them. SGLang 0.5.16 to 0.5.23 write them at every step; was no request running, "
                f"or is it another version?"
            )
        own = [event for event in events if _thread(event) in threads]
        launched = {event["args"].get("correlation"): event["ts"] for event in events if event.get("cat") in _LAUNCHES}
        kernels = (
            Kernel(launched[event["args"]["correlation"]], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") in _ON_GPU and event["args"].get("correlation") in launched
        )
        return cls(
            path,
            _ordered(event for event in own if _is_span(event)),
            tuple(sorted(kernels, key=lambda kernel: kernel.launched)),
            _ordered(event for event in own if event.get("cat") in _LAUNCHES and "Synchronize" in event["name"]),
        )

    def launched_within(self, start: float, end: float) -> tuple[Kernel, ...]:
        """Kernels that the host launched in [start, end)."""
        first, last = (bisect_left(self.kernels, at, key=lambda kernel: kernel.launched) for at in (start, end))
        return self.kernels[first:last]

    def waited_within(self, start: float, end: float) -> float:
        """Microseconds of [start, end) in which the host waited for the GPU."""
        return sum(max(0.0, min(wait.end, end) - max(wait.start, start)) for wait in self.waits)


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of these kernels ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def is_whole(path: Path) -> bool:
    """Whether the server has written this file to its end: gzip has a checksum there."""
    try:
        with gzip.open(path) as file:
            while file.read(2**20):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True


def _is_span(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _thread(event: dict[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def _ordered(events: Iterable[dict[str, Any]]) -> tuple[Span, ...]:
    spans: Iterator[Span] = (Span(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events)
    return tuple(sorted(spans, key=lambda span: span.start))
