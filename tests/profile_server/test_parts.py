"""A step by part: on cut-outs of real traces of an H200, and on a step whose every microsecond is known.

The cut-outs are of SGLang 0.5.16 (SmolLM2-135M, Triton attention, CUDA graphs): spans, launches and kernels of five target
forwards, of a plain server with 16 requests and of an EAGLE-3 server (3 steps, top-k 1, a random draft) with one.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from tasks.common.errors import DraftlineError
from tasks.profile_server.parts import (
    ACCEPTANCE,
    DECODE,
    DRAFT,
    EXTEND,
    PREPARE,
    SAMPLING,
    SCHEDULER,
    VERIFY,
    WAITING,
    take_apart,
)
from tasks.profile_server.trace import Trace, is_whole

PLAIN, EAGLE3 = (Path(__file__).parent / name for name in ("h200_plain_16.json.gz", "h200_eagle3_1.json.gz"))
ROUND_US = 1000  # of the step whose every microsecond is known


def events_of(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.fixture
def written(tmp_path):
    """`written(events)`: the path of a trace that holds them."""

    def write(events: list[dict]) -> Path:
        path = tmp_path / "1-TP-0.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        return path

    return write


def event(name: str, ts: float, dur: float, cat: str = "user_annotation", correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    tid = 7 if cat in ("kernel", "gpu_memcpy") else 1
    return {"ph": "X", "cat": cat, "name": name, "pid": tid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def known_round(number: int) -> list[dict]:
    """A round of 1000 us from a verify's start. The verify's graph of two kernels, which overlap on two streams, runs while the
    host is already in the draft extend, which waits 20 us and the scheduler 100 us for the GPU."""
    at, graph, draft = number * ROUND_US, 10 * number, 10 * number + 1
    return [
        event("scheduler.run_batch", at - 150, 550),
        event("step[TARGET_VERIFY bs=4]", at, 100),
        event("cudaGraphLaunch", at + 10, 20, "cuda_runtime", graph),
        event("draft_extend", at + 160, 140),
        event("cudaStreamSynchronize", at + 170, 20, "cuda_runtime", draft + 4),
        event("verify kernel", at + 200, 200, "kernel", graph),
        event("verify kernel", at + 300, 200, "kernel", graph),
        event("scheduler.process_batch_result", at + 450, 300),
        event("cudaEventSynchronize", at + 500, 100, "cuda_runtime", draft + 5),
        event("draft", at + 870, 90),
        event("cuLaunchKernelEx", at + 880, 5, "cuda_driver", draft),
        event("draft kernel", at + 890, 30, "kernel", draft),
    ]


KNOWN = [one for number in range(4) for one in known_round(number)]


def test_a_round_is_taken_apart_to_the_microsecond(written):
    step = take_apart(Trace.read(written(KNOWN)), "speculative", 4)
    assert {part.name: (round(1e3 * part.host_ms), round(1e3 * part.gpu_ms)) for part in step.parts} == {
        VERIFY: (100, 300),
        ACCEPTANCE: (60, 0),
        EXTEND: (120, 0),
        DRAFT: (90, 30),
        PREPARE: (40, 0),
        SCHEDULER: (470, 0),
        WAITING: (120, 0),
    }
    assert (step.steps, step.period_ms, step.gpu_busy_ms) == (3, pytest.approx(1), pytest.approx(0.33))


def test_a_plain_steps_sampling_ends_where_the_result_is_copied(written):
    events = [
        one
        for at in range(0, 4 * ROUND_US, ROUND_US)
        for one in (
            event("scheduler.run_batch", at - 150, 550),
            event("step[DECODE bs=4]", at, 200),
            event("copy_result_to_cpu", at + 250, 60),
        )
    ]
    step = take_apart(Trace.read(written(events)), "baseline", 4)
    assert {part.name: round(1e3 * part.host_ms) for part in step.parts} == {DECODE: 200, SAMPLING: 50, SCHEDULER: 750}
    before_copies = [one for one in events if one["name"] != "copy_result_to_cpu"]
    step = take_apart(Trace.read(written(before_copies)), "baseline", 4)
    assert round(1e3 * step.part(SAMPLING).host_ms) == 200  # up to the end of run_batch


def test_without_a_gpu_there_are_host_times_alone(written):
    on_cpu = [one for one in KNOWN if one["cat"] == "user_annotation"]
    step = take_apart(Trace.read(written(on_cpu)), "speculative", 4)
    assert step.gpu_busy_ms is None
    assert {part.name: round(1e3 * part.host_ms) for part in step.parts} == {
        VERIFY: 100,
        ACCEPTANCE: 60,
        EXTEND: 140,
        DRAFT: 90,
        PREPARE: 40,
        SCHEDULER: 570,
    }


def test_the_verify_step_is_found_under_the_newer_name_too(written):
    renamed = [one | {"name": one["name"].replace("TARGET_VERIFY", "VERIFY")} for one in KNOWN]
    step = take_apart(Trace.read(written(renamed)), "speculative", 4)
    assert step == take_apart(Trace.read(written(KNOWN)), "speculative", 4)


def test_a_round_with_a_prefill_in_it_does_not_count(written):
    five = [*KNOWN, *known_round(4)]
    prefill = event("step[EXTEND bs=1 toks=40]", 1700, 60)
    assert take_apart(Trace.read(written(five)), "speculative", 4).steps == 4
    assert take_apart(Trace.read(written([*five, prefill])), "speculative", 4).steps == 3


def test_what_a_graph_runs_counts_as_the_target_verifys_though_it_runs_after_the_call():
    launched = defaultdict(list)
    for one in events_of(EAGLE3):
        if one["cat"] == "kernel":
            launched[one["args"]["correlation"]].append(one["dur"])
    graphs = [sum(durations) for durations in launched.values() if len(durations) > 300][:4]  # the draft's are smaller
    step = take_apart(Trace.read(EAGLE3), "speculative", 1)
    verify = step.part(VERIFY)
    assert verify.gpu_ms == pytest.approx(median(graphs) / 1e3, rel=0.01)
    assert verify.gpu_ms > 1.5 * verify.host_ms


def test_a_round_on_the_h200():
    step = take_apart(Trace.read(EAGLE3), "speculative", 1)
    gpu = {part.name: part.gpu_ms for part in step.parts}
    assert step.steps == 4
    assert gpu[VERIFY] == pytest.approx(1.34, abs=0.01)
    assert gpu[DRAFT] == pytest.approx(0.136, abs=0.005)
    assert gpu[EXTEND] == pytest.approx(0.114, abs=0.005)
    assert sum(gpu.values()) == pytest.approx(step.gpu_busy_ms, rel=0.01)
    assert step.gpu_busy_ms < 0.3 * step.period_ms  # the host was the limit: the profiler recorded Python stacks


def test_a_plain_step_on_the_h200():
    step = take_apart(Trace.read(PLAIN), "baseline", 16)
    assert [part.name for part in step.parts] == [DECODE, SAMPLING, SCHEDULER, WAITING]
    assert step.part(DECODE).gpu_ms == pytest.approx(0.975, abs=0.01)
    assert step.part(SAMPLING).gpu_ms == pytest.approx(0.017, abs=0.002)  # argmax over the vocabulary


def test_a_trace_of_fewer_requests_at_once_is_refused():
    with pytest.raises(
        DraftlineError, match=r"h200_eagle3_1.*0 whole steps of 4 requests.*bs >= 4.*serve.max_total_tokens"
    ):
        take_apart(Trace.read(EAGLE3), "speculative", 4)


def test_a_trace_without_the_spans_names_what_it_holds(written):
    path = written([one for one in KNOWN if one["name"] != "draft_extend"])
    with pytest.raises(DraftlineError, match=rf"{path}: 0 whole steps.*`draft_extend`.*it holds draft, scheduler\."):
        take_apart(Trace.read(path), "speculative", 4)


def test_a_plain_servers_trace_is_no_round():
    with pytest.raises(DraftlineError, match=r"h200_plain_16.*TARGET_.*VERIFY.*it holds .*step\[DECODE bs=16\]"):
        take_apart(Trace.read(PLAIN), "speculative", 16)


def test_a_trace_of_something_else_is_refused(written):
    path = written([one for one in KNOWN if one["name"] != "scheduler.run_batch"])
    with pytest.raises(DraftlineError, match=rf"{path}: not the trace of one SGLang scheduler.*run_batch.*0 threads"):
        Trace.read(path)


def test_a_layout_that_is_unknown_is_one_sentence(written):
    path = written([{key: value for key, value in one.items() if key != "dur"} for one in KNOWN])
    with pytest.raises(DraftlineError, match=rf"{path}: not a whole trace.*KeyError: 'dur'.*Looked for"):
        Trace.read(path)


def test_a_trace_that_is_still_being_written_is_told_from_a_whole_one(tmp_path):
    partial = tmp_path / "1-TP-0.trace.json.gz"
    partial.write_bytes(EAGLE3.read_bytes()[:-4])
    assert is_whole(EAGLE3)
    assert not is_whole(partial)
    with pytest.raises(DraftlineError, match=rf"{partial}: not a whole trace"):
        Trace.read(partial)
