"""One decode step, or one draft-plus-verify round, taken apart along the engine's own spans.

A round lasts from the start of one target verify to the start of the next:

    target verify | sampling, acceptance | draft extend | (scheduler) | draft | verify preparation

and a plain step from the start of one target decode to the next: target decode | sampling | (scheduler). Every moment of
the scheduler's thread is in exactly one part, waits for the GPU in one of their own. A kernel belongs to the part that
launched it, however much later it runs: the overlap scheduler runs ahead of the GPU. Figures are medians over rounds.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from tasks.common.errors import DraftlineError
from tasks.profile_server.trace import RUN_BATCH, Span, Trace, busy

Kind = Literal["baseline", "speculative"]
DECODE, VERIFY, PREPARE = "target decode", "target verify", "verify preparation"
DRAFT, EXTEND, SAMPLING, ACCEPTANCE = "draft", "draft extend", "sampling", "sampling, acceptance"
SCHEDULER, WAITING = "scheduler, other host work", "waiting for the GPU"
PARTS: dict[Kind, tuple[str, ...]] = {
    "baseline": (DECODE, SAMPLING, SCHEDULER, WAITING),
    "speculative": (DRAFT, PREPARE, VERIFY, ACCEPTANCE, EXTEND, SCHEDULER, WAITING),
}
# 0.5.16 names the verify step by its forward mode, 0.5.23 by its stage.
_FORWARD: dict[Kind, re.Pattern] = {
    "baseline": re.compile(r"step\[DECODE bs=(\d+)"),
    "speculative": re.compile(r"step\[(?:TARGET_)?VERIFY bs=(\d+)"),
}
_PREFILL = re.compile(r"step\[(EXTEND|MIXED) ")
_FEWEST = 3  # rounds of which a median is worth its name


@dataclass(frozen=True)
class Part:
    """Milliseconds of a round, median over rounds.

    Attributes:
        gpu_ms: in which the GPU ran what this part launched; None without a GPU.
    """

    name: str
    host_ms: float
    gpu_ms: float | None


@dataclass(frozen=True)
class Step:
    """A round or a plain step; milliseconds, medians over rounds.

    Attributes:
        steps: of which these are the medians.
        period_ms: from the start of one target forward to the start of the next, under the profiler.
        gpu_busy_ms: in which any kernel of it ran; None without a GPU.
    """

    steps: int
    period_ms: float
    parts: tuple[Part, ...]
    gpu_busy_ms: float | None

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def take_apart(trace: Trace, kind: Kind, requests: int) -> Step:
    """The median round of those in which all requests took part and none was prefilled.

    Args:
        requests: that decode at once.

    Raises:
        DraftlineError: the trace does not hold enough such rounds; says what was looked for.
    """
    rounds = [
        (start, end, segments)
        for start, end in _periods(trace, kind, requests)
        if (segments := _segments(trace, kind, start, end)) is not None
    ]
    if len(rounds) < _FEWEST:
        raise DraftlineError(_too_few(trace, kind, requests, len(rounds)))
    measured = [_measure(trace, start, end, segments, kind) for start, end, segments in rounds]
    on_gpu = bool(trace.kernels)

    def of(key: str, side: int) -> float:
        return median(one[key][side] for one in measured) / 1e3

    return Step(
        steps=len(rounds),
        period_ms=of("period", 0),
        parts=tuple(
            Part(name, of(name, 0), of(name, 1) if on_gpu else None)
            for name in PARTS[kind]
            if on_gpu or name != WAITING
        ),
        gpu_busy_ms=of("period", 1) if on_gpu else None,
    )


def _periods(trace: Trace, kind: Kind, requests: int) -> Iterator[tuple[Span, Span]]:
    """Target forwards that follow each other, each over all requests."""
    forwards = [(span, int(found[1])) for span in trace.spans if (found := _FORWARD[kind].match(span.name))]
    for (start, size), (end, next_size) in pairwise(forwards):
        if size >= requests and next_size >= requests:
            yield start, end


def _segments(trace: Trace, kind: Kind, start: Span, end: Span) -> dict[str, tuple[float, float]] | None:
    """The host time of each part but the scheduler's, None if another kind of step is in between."""
    within = [span for span in trace.spans if start.start <= span.start < end.start]
    if any(_PREFILL.match(span.name) for span in within):
        return None

    def only(name: str) -> Span | None:
        found = [span for span in within if span.name == name]
        return found[0] if len(found) == 1 else None

    if kind == "speculative":
        extend, draft = only("draft_extend"), only("draft")
        if extend is None or draft is None:
            return None
        return {
            VERIFY: (start.start, start.end),
            ACCEPTANCE: (start.end, extend.start),
            EXTEND: (extend.start, extend.end),
            DRAFT: (draft.start, draft.end),
            PREPARE: (draft.end, end.start),
        }
    batch = next((span for span in trace.spans if span.name == RUN_BATCH and span.start < start.start < span.end), None)
    if batch is None:
        return None
    copy = only("copy_result_to_cpu")
    return {DECODE: (start.start, start.end), SAMPLING: (start.end, copy.start if copy else batch.end)}


def _measure(
    trace: Trace, start: Span, end: Span, segments: dict[str, tuple[float, float]], kind: Kind
) -> dict[str, tuple[float, float]]:
    """(host, GPU) microseconds of each part of one round, and of its whole period."""
    begin, until = start.start, end.start
    kernels = trace.launched_within(begin, until)
    waiting = trace.waited_within(begin, until)
    host = {name: to - at - trace.waited_within(at, to) for name, (at, to) in segments.items()}
    host |= {SCHEDULER: until - begin - waiting - sum(host.values()), WAITING: waiting}
    launched = {name: trace.launched_within(at, to) for name, (at, to) in segments.items()}
    known = {id(kernel) for part in launched.values() for kernel in part}
    launched[SCHEDULER] = tuple(kernel for kernel in kernels if id(kernel) not in known)
    parts = {name: (host[name], busy(launched.get(name, ()))) for name in PARTS[kind]}
    return parts | {"period": (until - begin, busy(kernels))}


def _too_few(trace: Trace, kind: Kind, requests: int, found: int) -> str:
    names: Sequence[str] = sorted({span.name for span in trace.spans})
    wanted = "`draft`, `draft_extend`" if kind == "speculative" else f"`{RUN_BATCH}`"
    return (
        f"{trace.path}: {found} whole steps of {requests} requests in it, at least {_FEWEST} are needed. Looked for spans "
        f"{_FORWARD[kind].pattern!r} of bs >= {requests}, with {wanted} and no prefill between them; it holds "
        f"{', '.join(names)}. If bs is smaller, the server did not run all requests at once: raise serve.max_total_tokens or "
        f"profile fewer. If the names are others, this SGLang is another than 0.5.16 to 0.5.23."
    )
