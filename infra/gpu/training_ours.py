"""Draftline's training step on stored states: tokens/s, memory, how busy GPU and host are, and where the time goes."""

import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from infra.gpu.gpu_busy import Busy
from infra.gpu.training_sizes import RandomStates, TargetStates
from tasks.common.draft import Eagle3Draft
from tasks.common.hidden_states import HiddenStates
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import BatchStream, DraftData
from tasks.train_draft.initialise import initialise
from tasks.train_draft.replay import ReplayedStep
from tasks.train_draft.step import StepSums, TrainStep
from tasks.train_draft.target_head import RestrictedHead, TargetHead, cache_target_argmax

_PROFILED_STEPS = 3
# What a kernel belongs to, by its name; the first that fits.
_GROUPS = (
    ("attention", ("flex",)),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::addmm", "aten::bmm")),
    ("optimizer and clipping", ("multi_tensor", "fused_adam", "foreach", "_fused_adamw")),
    ("compiled, with sums", ("triton_red", "triton_per")),
    ("compiled, elementwise", ("triton_poi",)),
    ("copies from the host", ("Memcpy HtoD",)),
    ("gathers and scatters", ("index", "gather", "scatter", "embedding")),
)
# Ranges of a program that the profiler lists beside the kernels in them.
_NO_KERNELS = ("Optimizer.", "##", "Torch-Compiled", "CompiledFunction", "ProfilerStep", "autograd::")


class Loop:
    """A draft, its batches from disk, and the optimiser; the arithmetic and the loader of `tasks.train_draft`, nothing read out."""

    def __init__(self, states: RandomStates | TargetStates, stored: HiddenStates, kind: type[TrainStep], args):
        size, device = states.size, args.device
        dtype = torch.float32 if device == "cpu" else torch.bfloat16

        class Weights:
            lm_head = staticmethod(states.lm_head.float)

        class Shape:
            rms_norm_eps = 1e-5

        head = TargetHead(Weights(), Shape(), last_is_normed=True, device=device)
        argmax = cache_target_argmax(stored, head, stored.folder / "argmax.npy")
        form = BatchForm.of(states.vocab_map, device, dtype, args.ttt_length, size.step_tokens)
        self.stream = BatchStream(DraftData(stored, argmax, size.step_tokens, form), 0, args.workers)
        self.draft = Eagle3Draft(size.config(), states.embed_tokens.to(dtype))
        initialise(self.draft, states.vocab_map, 0, None, None, None)
        self.draft.to(device)
        self.step = kind(self.draft, RestrictedHead(head, states.vocab_map, dtype), args.recompute)
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
        self._rate, self._warmup = args.learning_rate, max(1, round(0.015 * args.steps))
        self.number = 0

    def run(self, batch) -> tuple[torch.Tensor, StepSums]:
        self.number += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self.number / self._warmup)
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = self.step(batch)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 0.5)
        self.optimizer.step()
        return loss, sums


def measure_ours(
    states: RandomStates | TargetStates, stored: HiddenStates, kind: type[TrainStep], args
) -> dict[str, Any]:
    """Figures over the steps behind the first `args.discard`."""
    on_gpu, began = args.device != "cpu", time.perf_counter()
    if on_gpu:
        torch.cuda.empty_cache()
    loop = Loop(states, stored, kind, args)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batches, losses, curve, waited, tokens, tenth = iter(loop.stream), [], [], 0.0, 0, None
    with Busy() as busy:
        for number in range(1, args.steps + 1):
            if number == args.discard + 1:
                _synchronize(on_gpu)
                started, waited, tokens = time.perf_counter(), 0.0, 0
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            loss, sums = loop.run(batch)
            losses.append(loss)
            tokens += batch.num_tokens
            if number % 10 == 0:
                curve.append(_point(number, loss, sums))
            if number == 10:
                _synchronize(on_gpu)
                tenth = time.perf_counter() - began
        _synchronize(on_gpu)
        seconds = time.perf_counter() - started
    found = {
        "tokens_per_s": round(tokens / seconds),
        "ms_per_step": round(1e3 * seconds / (args.steps - args.discard), 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else None,
        "host_ms_per_step": _host_ms(loop, next(batches), on_gpu),
        "gpu_busy_by_driver": busy.since(started),
        "host_waits_for_data": round(waited / seconds, 4),
        "seconds_to_step_10": tenth and round(tenth, 1),
        "kernels_compiled": counters["stats"]["unique_graphs"],
        "parts_ms": _parts(loop, next(batches), on_gpu),
        "profile": _profile(loop, batches, on_gpu),
        "losses": torch.stack(losses).tolist(),
        "curve": curve,
    }
    batches.close()
    return found


def _point(number: int, loss: torch.Tensor, sums: StepSums) -> dict[str, Any]:
    return {
        "step": number,
        "loss": round(loss.item(), 4),
        "loss_by_position": [round(v, 4) for v in (sums.loss / sums.loss_positions.clamp(min=1)).tolist()],
        "accuracy_by_position": [round(v, 4) for v in (sums.correct / sums.supervised.clamp(min=1)).tolist()],
    }


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _host_ms(loop: Loop, batch, on_gpu: bool) -> float:
    """Milliseconds until a step is handed to a GPU that has nothing else to do; on a CPU they are the step's."""
    spent = 0.0
    for _ in range(5):
        _synchronize(on_gpu)
        began = time.perf_counter()
        loop.run(batch)
        spent += time.perf_counter() - began
    return round(1e3 * spent / 5, 2)


def _parts(loop: Loop, batch, on_gpu: bool) -> dict[str, float]:
    """Milliseconds of a step's parts, each waited for: their sum is more than a step that is not waited for."""
    draft, parts = loop.draft, defaultdict(float)

    def timed(name: str, run):
        _synchronize(on_gpu)
        began = time.perf_counter()
        result = run()
        _synchronize(on_gpu)
        parts[name] += 1e3 * (time.perf_counter() - began) / 5
        return result

    module = loop.step.module
    for _ in range(5):
        loop.optimizer.zero_grad(set_to_none=True)
        if isinstance(loop.step, ReplayedStep):
            timed("forward and backward, replayed", lambda: loop.step(batch))
        else:
            timed("layer, forward (again below)", lambda: draft.unroll(batch.inputs, batch.samples.aux))
            loss, _ = timed(
                "layer and loss, forward, with the gradient of the loss",
                lambda: module(batch, batch.lessons.loss_positions),
            )
            timed("layer, backward", loss.backward)
        timed("clipping", lambda: torch.nn.utils.clip_grad_norm_(draft.parameters(), 0.5))
        timed("optimizer", loop.optimizer.step)
    return {name: round(value, 2) for name, value in parts.items()}


def _profile(loop: Loop, batches, on_gpu: bool) -> dict[str, Any]:
    """Share of kernel groups in a few steps, the longest kernels, and how busy the GPU was meanwhile."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    ready = [next(batches) for _ in range(_PROFILED_STEPS)] if not on_gpu else None
    _synchronize(on_gpu)
    with profile(activities=activities) as profiler:
        for number in range(_PROFILED_STEPS):
            loop.run(ready[number] if ready else next(batches))
        _synchronize(on_gpu)
    groups, kernels, spans = Counter(), Counter(), []
    for event in profiler.events():
        if on_gpu and (event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(_NO_KERNELS)):
            continue
        start, end = event.time_range.start, event.time_range.end
        spent = end - start if on_gpu else event.self_cpu_time_total
        name = next((group for group, parts in _GROUPS if any(part in event.name for part in parts)), "other")
        groups[name] += spent
        kernels[event.name[:90]] += spent
        spans.append((start, end))
    per_step = 1e3 * _PROFILED_STEPS
    return {
        "kernels_per_step": round(len(spans) / _PROFILED_STEPS),
        "gpu_busy_while_profiled": round(_covered(spans), 3) if on_gpu else None,
        "ms_by_group": {name: round(value / per_step, 3) for name, value in groups.most_common()},
        "longest": {name: round(value / per_step, 3) for name, value in kernels.most_common(15)},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Share of the time from first to last that some span covers."""
    covered, reached = 0.0, min(start for start, _ in spans)
    first = reached
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / max(reached - first, 1e-9)
