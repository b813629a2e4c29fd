"""What is made of a profile: reports/profile.json and the tables, from the cut-outs of real traces of an H200."""

import json
from importlib.metadata import version

import pytest

from tasks.common.advice_reports import measured_step_share
from tasks.common.machine import machine
from tasks.common.params import Params
from tasks.profile_server.parts import take_apart
from tasks.profile_server.profile import Profile, plain_alone, report
from tasks.profile_server.show import show
from tasks.profile_server.trace import Trace
from tests.profile_server.test_parts import EAGLE3, PLAIN

IDENTITY = {"target_sha256": "1" * 64, "draft_sha256": "2" * 64, "machine": machine("cpu")}
PLAIN_MS, ROUND_MS = 1.6, 4.0  # as if timed without the profiler


@pytest.fixture
def found() -> dict:
    plain = Profile(1, PLAIN_MS, take_apart(Trace.read(PLAIN), "baseline", 16), PLAIN)
    drafted = Profile(1, ROUND_MS, take_apart(Trace.read(EAGLE3), "speculative", 1), EAGLE3)
    return report([plain], [drafted], Params(), IDENTITY)


def test_a_round_must_yield_as_many_tokens_as_plain_steps_fit_into_it(found):
    assert found["by_requests"][0]["break_even_accept_length"] == 2.5


def test_the_gpu_is_idle_for_what_its_kernels_leave_of_the_step_without_the_profiler(found):
    taken = found["by_requests"][0]["round"]
    assert taken["gpu_idle_ms"] == pytest.approx(ROUND_MS - taken["gpu_busy_ms"], abs=1e-3)
    shares = [part["gpu_share"] for part in taken["parts"]]
    assert sum(shares) + taken["gpu_idle_share"] == pytest.approx(1, abs=0.01)


def test_advice_on_this_target_draft_and_machine_reads_it(found, tmp_path):
    settings = IDENTITY | {"device": "cpu", "dtype": "float32", "version": version("sglang"), "extra_args": []}
    (tmp_path / "profile.json").write_text(json.dumps(found))
    assert measured_step_share(1, 3, 1, settings, tmp_path) > 0


def test_the_machine_is_named_at_the_start_so_that_a_driver_that_fails_by_now_costs_no_report():
    plain = Profile(1, PLAIN_MS, take_apart(Trace.read(PLAIN), "baseline", 16), PLAIN)
    params = Params.model_validate({"target": {"device": "cuda"}})
    kept = plain_alone([plain], params, IDENTITY | {"machine": "an H200"}, "the driver failed")
    assert kept["settings"]["machine"] == "an H200"


def test_kernels_that_took_longer_than_the_step_without_the_profiler_leave_nothing_idle():
    plain = Profile(1, 0.9, take_apart(Trace.read(PLAIN), "baseline", 16), PLAIN)  # its kernels take 1.00 ms
    drafted = Profile(1, ROUND_MS, take_apart(Trace.read(EAGLE3), "speculative", 1), EAGLE3)
    taken = report([plain], [drafted], Params(), IDENTITY)["by_requests"][0]["plain_step"]
    assert taken["gpu_busy_ms"] > 0.9
    assert (taken["gpu_idle_ms"], taken["gpu_idle_share"]) == (0, 0)


def test_a_draft_of_three_steps_makes_two_passes_of_its_own(found):
    taken = found["by_requests"][0]["round"]
    draft = next(part for part in taken["parts"] if part["part"] == "draft")
    assert taken["draft_passes"] == 2
    assert taken["draft_pass"]["gpu_ms"] == pytest.approx(draft["gpu_ms"] / 2, abs=1e-3)


def test_the_tables_say_what_was_measured_under_the_profiler(found, capsys):
    show(found)
    text = capsys.readouterr().out
    assert "Step times, without the profiler" in text
    assert "A draft-plus-verify round, traced" in text
    assert "target verify" in text and "1.338" in text


def test_what_the_profiler_costs_is_what_was_measured_and_kernels_are_the_gpus(found, capsys):
    row = found["by_requests"][0]
    row["plain_step"]["traced_ms"], row["round"]["traced_ms"] = 0.96 * PLAIN_MS, 1.07 * ROUND_MS
    show(found)
    text = " ".join(capsys.readouterr().out.split())
    assert "Under the profiler a plain step took 0.96 times as long as without it, a round 1.07; GPU times" in text
    for kind in ("plain_step", "round"):
        for name in ("gpu_busy_ms", "gpu_idle_traced_ms", "gpu_idle_ms", "gpu_idle_share"):
            del row[kind][name]
    show(found)
    assert "GPU times" not in capsys.readouterr().out
