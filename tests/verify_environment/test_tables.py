"""What people read: fits a log, says every verdict in words, and tells what to do."""

import io

import pytest
from rich.console import Console

from tasks.common.check import Check, Expectation, require_no_errors, worst
from tasks.common.errors import DraftlineError
from tasks.verify_environment.facts import Compute, Engine, Gpus, Interpreter, Repository, TargetFacts
from tasks.verify_environment.plan import Estimate
from tasks.verify_environment.report import Plan, Report
from tasks.verify_environment.table import print_report

PORTS = Expectation("ports", "30000 and 30001 free", "A stale server answers for the new one.")
FAILED = PORTS.error("30000 held by pid 812 (python -m sglang.launch_server " + "--flag " * 30 + ")", "kill 812")
WARNED = Expectation("dtype", "float32 on cpu", "Speed.").warning("bfloat16 on cpu", "set target.dtype: float32")
FINE = Expectation("python", "3.11 to 3.13", "Wheels.").ok("3.11.7")
ABSENT = Expectation("driver", "a driver", "Kernels.").not_applicable("target.device is cpu")


def report(checks: list[Check], stages: list[Estimate]) -> Report:
    plan = Plan(
        folder="p", sources=[], settings={"chain": [3, 1, 4]}, stages=stages, disk=[], seconds=7200.0, gpu_hours=16.0
    )
    return Report(
        verdict=worst(checks), checks=checks, plan=plan, versions={}, machine={"load_average": [0.1], "cores": 2}, gpus=Gpus(),
        compute=Compute(), engine=Engine(), target=TargetFacts(), interpreter=Interpreter(), repository=Repository(), seconds={},
    )  # fmt: skip


def printed(checks: list[Check], stages: list[Estimate] = ()) -> str:
    log = io.StringIO()
    print_report(report(checks, list(stages)), Console(file=log, highlight=False))
    return log.getvalue()


def test_a_log_has_no_colour_and_uses_100_columns():
    text = printed([FINE, FAILED, WARNED, ABSENT], [Estimate("train_draft", 409_600, 90.0, 0, 8, "400 steps " * 20)])
    assert "\x1b" not in text
    assert 90 < max(map(len, text.splitlines())) <= 100


def test_every_check_that_is_not_ok_says_what_to_do():
    text = printed([FINE, FAILED, WARNED, ABSENT])
    assert "kill 812" in text
    assert "set target.dtype: float32" in text
    assert text.count("Expected:") == 2


def test_hours_and_gpu_hours_are_shown_by_stage():
    text = printed([FINE], [Estimate("train_draft", 409_600, 7200.0, 157_000_000, 8, "400 steps")])
    row = next(line for line in text.splitlines() if "train_draft" in line)
    assert row.split()[:7] == ["train_draft", "409,600", "2.0", "h", "157", "MB", "16.00"]


def test_no_estimate_is_said_rather_than_shown_as_nothing():
    assert "No estimate" in printed([FAILED])


def test_errors_are_summed_up_each_with_its_fix():
    with pytest.raises(DraftlineError) as raised:
        require_no_errors([FINE, FAILED, WARNED, PORTS.error("30001 held by pid 813", "kill 813")])
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["- ports", "- ports"]
    assert lines[1].endswith("Fix: kill 813")


def test_warnings_do_not_stop_the_run():
    require_no_errors([FINE, WARNED, ABSENT])
    assert worst([FINE, WARNED, ABSENT]) == "warning"
