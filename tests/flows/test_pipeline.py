import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.dvc_stages import StageProcess, read_stages
from flows.pipeline import PipelineParams, pipeline
from tasks.common.errors import DraftlineError
from tasks.common.mlflow_layout import connect
from tasks.common.params import load_params
from tests.flows.processes import processes_in, until
from tests.flows.toy_project import dvc_repro


@pytest.fixture(scope="module")
def prefect(api):
    """Flows of this process report to the real server."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api}):
        yield


def run(**params):
    return pipeline(PipelineParams(**params), return_state=True)


def states(state) -> dict[str, str]:
    return {stage: name for stage, name, _ in state.result().stages}


def tracked():
    """The one MLflow run of the project in the current directory."""
    client = connect(load_params().tracking)
    (found,) = client.search_runs([client.get_experiment_by_name("draftline").experiment_id])
    return found


def log_lines(state, last: str) -> dict[str, float]:
    """The lines of a run with their times, as Prefect's server has them once it has `last`."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[state.state_details.flow_run_id]))

    def lines() -> dict[str, float] | None:
        with get_client(sync_client=True) as client:
            logs = client.read_logs(wanted, sort=LogSort.TIMESTAMP_ASC)
        found = {log.message: log.timestamp.timestamp() for log in logs}
        return found if last in found else None

    return until(lines)


def test_dependencies_give_the_order(toy):
    assert [stage.name for stage in read_stages()] == ["first", "slow", "train_draft"]


def test_description_and_timeout_come_from_dvc_yaml(toy):
    slow = read_stages()[1]
    assert (slow.description, slow.timeout_seconds) == ("takes a while", 120)


def test_until_keeps_a_stage_and_what_it_needs(toy):
    assert [stage.name for stage in read_stages(until="slow")] == ["first", "slow"]


def test_an_unknown_stage_is_named_with_those_that_exist(toy):
    with pytest.raises(DraftlineError, match=r"no stage is named trian\. Stages: train_draft, slow, first"):
        read_stages(until="trian")


def test_stages_run_in_order_streaming_and_dvc_repro_then_has_nothing_to_do(toy, prefect, environment):
    Path("seconds").write_text("3")
    state = run()
    assert list(states(state).items()) == [("first", "Completed"), ("slow", "Completed"), ("train_draft", "Completed")]
    at = log_lines(state, last="train_draft ends")
    assert at["first begins"] < at["slow begins"] < at["train_draft begins"]
    assert at["slow ends"] - at["slow begins"] > 1  # it sleeps for 3 s in between
    lock = Path("dvc.lock").read_bytes()
    assert "Data and pipelines are up to date." in dvc_repro(toy, environment)
    assert Path("dvc.lock").read_bytes() == lock


def test_after_dvc_repro_the_flow_has_nothing_to_do(reproduced, prefect):
    lock = Path("dvc.lock").read_bytes()
    assert states(run()) == {"first": "Cached", "slow": "Cached", "train_draft": "Cached"}
    assert Path("dvc.lock").read_bytes() == lock
    assert tracked().data.metrics == {"predicted_accept_length": 2.5}  # measured by a run before this one


def test_a_stage_restored_from_the_run_cache_is_cached(reproduced, prefect):
    Path("dvc.lock").unlink()
    assert states(run(until="first")) == {"first": "Cached"}


def test_force_runs_an_unchanged_stage_again(reproduced, prefect):
    assert states(run(force=["first"], until="slow")) == {"first": "Completed", "slow": "Cached"}


def test_a_failure_names_the_stage_and_its_reason_and_ends_the_run(toy, prefect, caplog):
    Path("word").write_text("bad ")
    Path("seconds").write_text("0")
    state = run()
    assert "Finished in state Failed" in caplog.text
    assert "NoneType: None" not in caplog.text
    assert state.is_failed()
    assert state.message == "stage first: word holds 'bad'"
    assert not Path("artifacts/slow").exists()
    assert tracked().info.status == "FAILED"


def test_a_timeout_ends_the_stage_with_all_its_processes(toy, prefect):
    Path("seconds").write_text("600")
    dvc_yaml = Path("dvc.yaml")
    dvc_yaml.write_text(dvc_yaml.read_text().replace("timeout_seconds: 120", "timeout_seconds: 20"))
    state = run()
    assert state.message == "stage slow: Task run exceeded timeout of 20.0 second(s)"
    assert Path("slow.begun").exists()  # else it ended dvc, which had not come so far
    assert processes_in(toy) == []


def test_parameters_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="Extra inputs"):
        PipelineParams(untill="slow")


@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGHUP, True)],
    ids=["SIGTERM", "SIGTERM to the group", "Ctrl-C", "hang-up"],
)
def test_a_signal_ends_the_run_with_all_its_processes_and_one_line(toy, environment, number, to_group):
    """The real command with its own API server, which a signal to the whole process group reaches as well."""
    Path("seconds").write_text("600")
    command = [sys.executable, "-m", "flows.pipeline"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **output, start_new_session=True) as flow:
        try:
            until(lambda: processes_in(toy, "sleep"))
            assert len(processes_in(toy)) >= 5  # the flow, its API server, dvc, the stage, its sleep
            (os.killpg if to_group else os.kill)(flow.pid, number)
            assert flow.wait(timeout=20) == 128 + number
            until(lambda: not processes_in(toy), seconds=10)
        finally:
            for process in processes_in(toy):
                process.kill()
        said = flow.stdout.read()
    assert f"The pipeline was stopped by {number.name}. The same command goes on from there." in said
    assert "Traceback" not in said


def test_a_stage_that_ignores_sigterm_is_killed_and_its_server_reaped(toy, environment, monkeypatch):
    """A stage that is killed cannot stop its server, which lives in a session of its own."""
    monkeypatch.setattr("flows.dvc_stages._GRACE_SECONDS", 0.5)
    Path("step.py").write_text(STUBBORN)
    with StageProcess("first", force=False, environment={"PYTHONPATH": environment["PYTHONPATH"]}) as process:
        assert any("server runs" in line for line in process)
        (server,) = until(lambda: processes_in(toy, "sleep"))
    server.wait(timeout=10)
    assert processes_in(toy) == []


def test_a_progress_bar_gives_a_line_now_and_then(toy):
    Path("step.py").write_text("for i in range(100): print(f'{i} %', end='\\r')\nprint('100 %')\nraise SystemExit(1)")
    with StageProcess("first", force=False, environment={}) as process:
        lines = [line for line in process if line.endswith("%")]
    assert lines == ["0 %", "100 %"]


# The record is what tasks.common.server writes of a server that it starts.
STUBBORN = """\
import signal, subprocess, time
from tasks.common.server_session import Process, ServerRecord, boot_id, record_path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
ServerRecord("plain", 1, boot_id(), Process.current(), (Process.of(server.pid),)).write(record_path("plain", 1))
print("server runs", flush=True)
time.sleep(600)
"""
