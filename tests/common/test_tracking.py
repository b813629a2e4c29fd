import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.mlflow_layout import PARENT_VARIABLE, connect
from tasks.common.params import Params, Tracking
from tasks.common.tracking import PipelineRun, Tracker

REPOSITORY = Path(__file__).parents[2]
DVC_YAML = """\
stages:
  dump_hidden_states: {cmd: python stage.py dump_hidden_states, outs: [artifacts/hidden_states]}
  train_draft:
    desc: train it
    cmd: python stage.py train_draft
    deps: [stage.py, artifacts/hidden_states/train]
    params: [train_draft, target.device]
    outs: [artifacts/draft]
    metrics: [reports/train_draft.json: {cache: false}]
  export_draft: {cmd: python stage.py export_draft, deps: [artifacts/draft], outs: [artifacts/export]}
  benchmark:
    cmd: python stage.py benchmark
    deps: [artifacts/export]
    metrics: [reports/benchmark.json: {cache: false}]
"""
DVC_LOCK = """\
schema: '2.0'
stages:
  dump_hidden_states: {outs: [{path: artifacts/hidden_states, hash: md5, md5: 0123456789abcdef0123456789abcdef.dir}]}
  export_draft: {outs: [{path: artifacts/export, hash: md5, md5: fedcba9876543210fedcba9876543210.dir}]}
"""


def cell(draft: str, concurrency: int, speedup: float, temperature: float = 0.0) -> dict:
    """A row of the benchmark's table."""
    return {
        "draft": draft,
        "set": "heldout",
        "concurrency": concurrency,
        "temperature": temperature,
        "accept_length": 2.5,
        "survival": [0.8, 0.5, 0.2],
        "speedup": speedup,
        "tokens_per_s": {"pooled": 10 * concurrency * speedup},
        "baseline_tokens_per_s": {"pooled": 10 * concurrency},
    }


BENCHMARK = {
    "speculative": {"accept_length": 2.5, "tokens_per_s": 15.0, "survival": [0.8, 0.5, 0.2]},
    "baseline": {"tokens_per_s": 10.0},
    "speedup": 1.5,
    "lossless": True,
    "settings": {"draft_tokens": 4},
    "by_domain": [{"domain": "chat", "accept_length": 2.25, "survival": [0.7, 0.4, 0.15]}],
    "cells": [
        cell("speculative", 1, 1.5),
        cell("speculative", 8, 1.25),
        cell("speculative", 1, 1.125, temperature=1.0),
        cell("theirs", 1, 0.5),
    ],
    "drafts": {"speculative": {"draft_tokens": 4}, "theirs": {"draft_tokens": 6}},
}


@pytest.fixture
def params(tmp_path) -> Params:
    """The defaults, with a database of this test's own (a process keeps one store for each URI)."""
    return Params(tracking=Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"))


@pytest.fixture
def client(tmp_path, params, monkeypatch, empty_mlflow):
    """A pipeline's files with an empty MLflow database in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    shutil.copy(empty_mlflow, "mlflow.db")
    Path("dvc.yaml").write_text(DVC_YAML)
    Path("dvc.lock").write_text(DVC_LOCK)
    Path("reports").mkdir()
    Path("reports/train_draft.json").write_text(json.dumps({"predicted_accept_lengths": [1.5, 2.25, 2.75]}))
    Path("reports/benchmark.json").write_text(json.dumps(BENCHMARK))
    return connect(params.tracking)


def runs(client) -> dict[str, object]:
    """All runs by name."""
    experiment = client.get_experiment_by_name("draftline").experiment_id
    return {run.info.run_name: run for run in client.search_runs([experiment])}


def parent_and_child(client, stage: str):
    child = runs(client)[stage]
    return client.get_run(child.data.tags["mlflow.parentRunId"]), child


def test_a_stage_alone_is_a_child_of_a_parent_of_its_own(client, params):
    with Tracker.stage("train_draft", params):
        pass
    parent, child = parent_and_child(client, "train_draft")
    assert len(runs(client)) == 2
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert parent.data.params["train_draft.learning_rate"] == "0.001"
    assert parent.data.params["benchmark.num_prompts"] == str(params.benchmark.num_prompts)
    assert parent.data.tags["target"] == "builtin"
    assert len(parent.data.tags["dvc.lock.md5"]) == 32
    assert child.data.tags["mlflow.note.content"] == "train it"


def test_a_child_has_the_parameters_that_dvc_yaml_gives_its_stage(client, params):
    with Tracker.stage("train_draft", params):
        pass
    _, child = parent_and_child(client, "train_draft")
    assert {name.split(".")[0] for name in child.data.params} == {"train_draft", "target"}
    assert [name for name in child.data.params if name.startswith("target")] == ["target.device"]


def test_inputs_are_datasets_with_the_md5_of_dvc(client, params):
    with Tracker.stage("train_draft", params):
        pass
    _, child = parent_and_child(client, "train_draft")
    (read,) = child.inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("hidden_states/train", "0123456789abcdef0123456789abcdef")
    assert {tag.key: tag.value for tag in read.tags}["dvc_md5"] == "0123456789abcdef0123456789abcdef.dir"


def test_metrics_seconds_and_files_are_on_the_child(client, params):
    Path("plot.csv").write_text("1")
    with Tracker.stage("train_draft", params) as tracker:
        for step in (10, 20):
            tracker.log_metrics({"train/loss": 1 / step}, step)
        tracker.log_artifact(Path("plot.csv"))
    _, child = parent_and_child(client, "train_draft")
    history = client.get_metric_history(child.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(10, 0.1), (20, 0.05)]
    assert child.data.metrics["stage_seconds"] > 0
    assert [file.path for file in client.list_artifacts(child.info.run_id)] == ["plot.csv"]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(143), "KILLED")]
)
def test_an_exception_ends_child_and_parent(client, params, error, status):
    with pytest.raises(type(error)), Tracker.stage("train_draft", params):
        raise error
    parent, child = parent_and_child(client, "train_draft")
    assert (parent.info.status, child.info.status) == (status, status)


def test_under_the_flow_stages_share_its_parent_and_leave_its_end_to_it(client, params, monkeypatch):
    pipeline = PipelineRun(params, "amber-fox", {"prefect.flow_run_url": "http://prefect/runs/1"})
    for name, value in pipeline.environment.items():
        monkeypatch.setenv(name, value)
    for stage in ("train_draft", "export_draft"):
        with Tracker.stage(stage, params):
            pass
    parent, _ = parent_and_child(client, "export_draft")
    assert set(runs(client)) == {"amber-fox", "train_draft", "export_draft"}
    assert parent.data.tags["prefect.flow_run_url"] == "http://prefect/runs/1"
    assert parent.info.status == "RUNNING"
    pipeline.close("FAILED")
    assert runs(client)["amber-fox"].info.status == "FAILED"


def test_the_flow_ends_children_that_were_killed(client, params, monkeypatch):
    pipeline = PipelineRun(params, "amber-fox", {})
    monkeypatch.setenv(PARENT_VARIABLE, pipeline.environment[PARENT_VARIABLE])
    stage = Tracker.stage("train_draft", params)
    stage.__enter__()
    pipeline.close("KILLED")
    assert runs(client)["train_draft"].info.status == "KILLED"


def test_the_parent_has_the_headline_of_the_stages_that_ran(client, params, monkeypatch):
    pipeline = PipelineRun(params, "amber-fox", {})
    monkeypatch.setenv(PARENT_VARIABLE, pipeline.environment[PARENT_VARIABLE])
    with Tracker.stage("train_draft", params):
        pass
    # benchmark.json is on disk, but what it says was measured on an older draft.
    assert runs(client)["amber-fox"].data.metrics == {"predicted_accept_length": 2.75}
    with Tracker.stage("benchmark", params):
        pass
    parent = runs(client)["amber-fox"]
    assert {name: value for name, value in parent.data.metrics.items() if "/" not in name} == {
        "predicted_accept_length": 2.75,
        "accept_length": 2.5,
        "speedup": 1.5,
        "lossless": 1.0,
    }
    assert (parent.data.metrics["tokens_per_s/speculative"], parent.data.metrics["tokens_per_s/baseline"]) == (15, 10)


@pytest.fixture
def points(client, params):
    """Steps and values of a metric on the parent of a run whose benchmark was cached."""
    PipelineRun(params, "amber-fox", {}).log_headline("benchmark")
    parent = runs(client)["amber-fox"].info.run_id
    return lambda name: [(point.step, point.value) for point in client.get_metric_history(parent, name)]


def test_accept_length_is_charted_by_draft_tokens_and_survival_by_position(points):
    assert points("accept_length/all") == points("accept_length/heldout") == [(4, 2.5)]
    assert points("accept_length/chat") == [(4, 2.25)]
    assert points("accept_rate_by_position/chat") == [(1, 0.7), (2, 0.4), (3, 0.15)]


def test_greedy_speed_is_charted_by_requests_at_once(points):
    assert points("speedup/heldout") == [(1, 1.5), (8, 1.25)]
    assert points("tokens_per_s/heldout/speculative") == [(1, 15), (8, 100)]
    assert points("tokens_per_s/heldout/baseline") == [(1, 10), (8, 80)]


def test_another_draft_has_series_of_its_own(points):
    assert points("theirs/speedup/heldout") == [(1, 0.5)]
    assert points("theirs/accept_length/heldout") == [(6, 2.5)]
    assert points("theirs/accept_rate_by_position/heldout") == [(1, 0.8), (2, 0.5), (3, 0.2)]
    assert points("tokens_per_s/heldout/theirs") == [(1, 5)]


def test_a_set_that_is_a_domain_as_well_is_charted_once(client, params):
    both = {"domain": "heldout", "accept_length": 2.25, "survival": [0.7, 0.4, 0.15]}
    Path("reports/benchmark.json").write_text(json.dumps(BENCHMARK | {"by_domain": [both]}))
    PipelineRun(params, "amber-fox", {}).log_headline("benchmark")
    history = client.get_metric_history(runs(client)["amber-fox"].info.run_id, "accept_length/heldout")
    assert [(point.step, point.value) for point in history] == [(4, 2.5)]


def test_the_draft_is_an_external_model_with_its_accept_length(client, params):
    for name in ("amber-fox", "coral-owl"):  # the same weights measured twice are one model
        PipelineRun(params, name, {}).log_headline("benchmark")
    (model,) = client.search_logged_models([runs(client)["amber-fox"].info.experiment_id])
    assert model.tags["dvc_md5"] == "fedcba9876543210fedcba9876543210.dir"
    said = {metric.key: metric.value for metric in model.metrics}
    assert said["accept_length"] == 2.5
    assert set(said) == {"accept_length", "accept_length/all", "accept_length/chat", "accept_length/heldout"}
    assert [output.model_id for output in runs(client)["coral-owl"].outputs.model_outputs] == [model.model_id]


def test_a_stage_that_dvc_runs_first_logs_the_headline_of_what_lies_above_it(client, params):
    with Tracker.stage("export_draft", params):
        pass
    parent, _ = parent_and_child(client, "export_draft")
    assert parent.data.metrics == {"predicted_accept_length": 2.75}


def test_mlflow_run_id_of_the_environment_is_left_alone(client, params, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with Tracker.stage("train_draft", params) as tracker:
        tracker.log_metrics({"train/loss": 1.0})
    assert os.environ["MLFLOW_RUN_ID"] == "0" * 32
    assert parent_and_child(client, "train_draft")[1].data.metrics["train/loss"] == 1.0


def test_under_torchrun_only_rank_0_records(client, params, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Tracker.stage("train_draft", params) as tracker:
        tracker.log_metrics({"train/loss": 1.0})
    assert client.get_experiment_by_name("draftline") is None


STAGE = """\
import sys
from pathlib import Path
from tasks.common.params import load_params
from tasks.common.tracking import Tracker

with Tracker.stage(sys.argv[1], load_params()):
    Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
    Path(sys.argv[2]).write_text(sys.argv[1])
"""
TWO_STAGES = """\
stages:
  one: {cmd: python stage.py one artifacts/one, outs: [artifacts/one]}
  two: {cmd: python stage.py two artifacts/two, deps: [artifacts/one], outs: [artifacts/two]}
"""


def test_stages_of_one_dvc_repro_share_a_parent(client, tmp_path):
    Path("stage.py").write_text(STAGE)
    Path("dvc.yaml").write_text(TWO_STAGES)
    Path("dvc.lock").unlink()
    Path("params.yaml").write_text("{}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    for command in (["init", "--no-scm", "--quiet"], ["repro", "--quiet"]):
        subprocess.run([sys.executable, "-m", "dvc", *command], env=environment, check=True)
    found = runs(client)
    assert len(found) == 3
    assert found["one"].data.tags["mlflow.parentRunId"] == found["two"].data.tags["mlflow.parentRunId"]
    parent = client.get_run(found["two"].data.tags["mlflow.parentRunId"])
    assert (parent.info.run_name[:9], parent.info.status) == ("dvc repro", "FINISHED")
    (read,) = found["two"].inputs.dataset_inputs
    assert read.dataset.digest == "f97c5d29941bfb1b2fdab0874906ab82"  # of 'one'


def test_a_run_whose_process_was_killed_is_ended_by_the_next(client, params):
    lost = PipelineRun(params, "lost", {})
    client.set_tag(lost.environment[PARENT_VARIABLE], "process", f"{os.uname().nodename}:{os.getpid()}:1.00")
    PipelineRun(params, "next", {})
    assert (runs(client)["lost"].info.status, runs(client)["next"].info.status) == ("KILLED", "RUNNING")


@pytest.mark.parametrize("uri", ["sqlite:///nowhere/mlflow.db", "sqlite://mlflow.db", "postgers://localhost/mlflow"])
def test_a_uri_that_can_never_work_stops_the_stage_at_its_start(client, uri):
    params = Params(tracking=Tracking(uri=uri))
    with pytest.raises(DraftlineError, match=f"tracking.uri {uri}: .* Expected sqlite:///"), Tracker.stage("x", params):
        pass


def test_a_database_that_another_run_holds_stops_no_stage(client, capsys):
    with sqlite3.connect("held.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        with Tracker.stage("train_draft", Params(tracking=Tracking(uri="sqlite:///held.db"))):
            pass
    assert "does not answer" in capsys.readouterr().err


UNREACHABLE = Params(tracking=Tracking(uri="http://127.0.0.1:9"))


def test_a_record_that_mlflow_refuses_is_left_out_with_a_word_and_costs_no_other(client, params, capsys):
    with Tracker.stage("train_draft", params) as tracker:
        tracker.log_metrics({"a name (of none)": 1.0})
        tracker.log_metrics({"loss": 2.0})
    _, child = parent_and_child(client, "train_draft")
    assert (child.info.status, child.data.metrics["loss"]) == ("FINISHED", 2.0)
    assert "refuses a record, which is left out: Invalid value" in capsys.readouterr().err


def test_a_stage_goes_on_without_mlflow_and_says_so_once(client, capsys):
    with Tracker.stage("train_draft", UNREACHABLE) as tracker:
        began = time.monotonic()
        for step in range(1000):
            tracker.log_metrics({"train/loss": 1.0}, step)
        assert time.monotonic() - began < 5  # it does not try at every step
    said = capsys.readouterr().err
    assert said.count("does not answer ([Errno 111] Connection refused)") == 1
    assert "records are lost" in said


def test_what_waited_is_sent_when_mlflow_is_back(client, params, capsys):
    def rename(before: str, after: str) -> None:
        with sqlite3.connect("mlflow.db") as database:
            database.execute(f"ALTER TABLE {before} RENAME TO {after}")

    with Tracker.stage("train_draft", params) as tracker:
        rename("metrics", "away")
        tracker.log_metrics({"train/loss": 3.0}, 1)
        tracker.log_metrics({"train/loss": 2.0}, 2)
        assert capsys.readouterr().err.count("does not answer (no such table: metrics)") == 1
        rename("away", "metrics")
    _, child = parent_and_child(client, "train_draft")
    history = client.get_metric_history(child.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.0)]
    assert child.info.status == "FINISHED"


def test_a_pipeline_run_does_not_start_without_its_record(client):
    with pytest.raises(DraftlineError, match="MLflow does not answer"):
        PipelineRun(UNREACHABLE, "amber-fox", {})


@pytest.mark.parametrize("domain", ["C++", "Q&A (short)", "a/b\\..", "=1+1", "a\x00b", "a" * 300])
def test_a_domain_that_mlflow_would_refuse_is_charted_under_a_name_of_its_own(client, params, domain):
    both = [{"domain": name, "accept_length": 2.25, "survival": [0.7]} for name in (domain, domain + "!")]
    Path("reports/benchmark.json").write_text(json.dumps(BENCHMARK | {"by_domain": both}))
    PipelineRun(params, "amber-fox", {}).log_headline("benchmark")
    metrics = runs(client)["amber-fox"].data.metrics
    assert list(metrics.values()).count(2.25) == 2
    assert metrics["accept_length"] == 2.5


def test_the_prediction_is_for_the_steps_that_are_served(client, params):
    serve = params.serve.model_copy(update={"num_steps": 2})
    PipelineRun(params.model_copy(update={"serve": serve}), "amber-fox", {}).log_headline("train_draft")
    assert runs(client)["amber-fox"].data.metrics == {"predicted_accept_length": 2.25}


@pytest.mark.parametrize("damaged", ["{", "{}", "[]", '{"predicted_accept_lengths": [1.5, 2.25]}'])
def test_a_damaged_report_has_no_headline_says_so_and_stops_no_stage(client, params, damaged, capsys):
    Path("reports/train_draft.json").write_text(damaged)
    with Tracker.stage("export_draft", params):
        pass
    parent, _ = parent_and_child(client, "export_draft")
    assert (parent.info.status, parent.data.metrics) == ("FINISHED", {})
    assert "train_draft: nothing of its report goes on the parent run (" in capsys.readouterr().err
