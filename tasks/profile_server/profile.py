"""Both servers measured and traced, and what comes of it: reports/profile.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.server_plan import ServerPlan
from tasks.common.server_session import LOGS
from tasks.profile_server.decoding import ProfiledServer, step_ms, trace_steps
from tasks.profile_server.parts import DRAFT, Part, Step, take_apart
from tasks.profile_server.trace import Trace

TRACES = LOGS / "traces"


@dataclass(frozen=True)
class Profile:
    """One server with so many requests at once.

    Attributes:
        step_ms: a plain step or a round, without the profiler.
        traced: the same under the profiler, by part.
    """

    requests: int
    step_ms: float
    traced: Step
    trace: Path


def profile(plan: ServerPlan, prompts: Sequence[list[int]], requests: Sequence[int]) -> list[Profile]:
    """Start a server, and profile it with each number of requests.

    Raises:
        DraftlineError: the server failed, or its trace cannot be taken apart.
    """
    profiles = []
    with (
        ProfiledServer(plan) as server,
        progress(total=2 * len(requests), desc=f"{plan.kind} server", unit="run") as bar,
    ):
        # What the profiler has loaded stays in the process: all is timed before anything is traced.
        times = {}
        for count in requests:
            times[count] = step_ms(server, prompts, count)
            bar.update()
        for count in requests:
            path = trace_steps(server, prompts, count, TRACES / f"{plan.kind}-{count}")
            profiles.append(Profile(count, times[count], _take_apart(path, plan, count), path))
            bar.update()
    return profiles


def _take_apart(path: Path, plan: ServerPlan, requests: int) -> Step:
    step = take_apart(Trace.read(path), plan.kind, requests)
    if plan.device != "cpu" and step.gpu_busy_ms is None:
        raise DraftlineError(
            f"{path}: no kernel in the trace of a server on {plan.device}, host spans alone: the profiler could not read the "
            f"GPU. See {LOGS} for what CUPTI says; profiling may be kept for administrators (NVreg_RestrictProfilingToAdminUsers)."
        )
    return step


def report(
    baseline: Sequence[Profile], speculative: Sequence[Profile], params: Params, identity: Mapping[str, str]
) -> dict:
    """reports/profile.json.

    Args:
        identity: hashes of target and draft, and the machine, for the settings.
    """
    return {
        "by_requests": [_row(plain, drafted, params) for plain, drafted in zip(baseline, speculative, strict=True)],
        "settings": _settings(params, identity),
    }


def plain_alone(baseline: Sequence[Profile], params: Params, identity: Mapping[str, str], why: str) -> dict:
    """reports/profile.partial.json, where the speculative server could not be profiled."""
    return {
        "complete": False,
        "why": why,
        "by_requests": [_plain(profile) for profile in baseline],
        "settings": _settings(params, identity),
    }


def _settings(params: Params, identity: Mapping[str, str]) -> dict:
    return {
        "engine": "sglang",
        "version": version("sglang"),
        "device": params.target.device,
        "dtype": params.target.dtype,
        "steps": params.serve.num_steps,
        "topk": params.serve.eagle_topk,
        "draft_tokens": params.serve.num_draft_tokens,
        "extra_args": list(params.serve.extra_args),
        **identity,
    }


def _row(plain: Profile, drafted: Profile, params: Params) -> dict:
    return _plain(plain) | {
        "round_ms": round(drafted.step_ms, 4),
        "break_even_accept_length": round(drafted.step_ms / plain.step_ms, 3),
        "round": _taken(drafted) | _draft_pass(drafted.traced.part(DRAFT), params.serve.num_steps - 1),
    }


def _plain(profile: Profile) -> dict:
    return {
        "requests": profile.requests,
        "plain_step_ms": round(profile.step_ms, 4),
        "plain_step": _taken(profile),
    }


def _taken(profile: Profile) -> dict:
    """A step by part. Shares of the host are of the traced step, since its times are those under the profiler; those of the GPU,
    whose kernels it all but leaves as they are, of the step without it: where they took longer than that, nothing was idle."""
    traced = profile.traced
    row = {
        "trace": str(profile.trace),
        "traced_steps": traced.steps,
        "traced_ms": round(traced.period_ms, 4),
        "parts": [{"part": part.name, **_times(part, traced.period_ms, profile.step_ms)} for part in traced.parts],
    }
    if traced.gpu_busy_ms is None:
        return row
    idle = max(0.0, profile.step_ms - traced.gpu_busy_ms)
    return row | {
        "gpu_busy_ms": round(traced.gpu_busy_ms, 4),
        "gpu_idle_traced_ms": round(traced.period_ms - traced.gpu_busy_ms, 4),
        "gpu_idle_ms": round(idle, 4),
        "gpu_idle_share": round(idle / profile.step_ms, 4),
    }


def _times(part: Part, host_whole: float, gpu_whole: float) -> dict:
    times = {"host_ms": round(part.host_ms, 4), "host_share": round(part.host_ms / host_whole, 4)}
    if part.gpu_ms is None:
        return times
    return times | {"gpu_ms": round(part.gpu_ms, 4), "gpu_share": round(part.gpu_ms / gpu_whole, 4)}


def _draft_pass(draft: Part, passes: int) -> dict:
    """The draft's own passes of a round; its first token is the draft extend's."""
    if not passes:
        return {"draft_passes": 0}
    each = {"host_ms": draft.host_ms, "gpu_ms": draft.gpu_ms}
    return {"draft_passes": passes} | {
        "draft_pass": {side: round(ms / passes, 4) for side, ms in each.items() if ms is not None}
    }
