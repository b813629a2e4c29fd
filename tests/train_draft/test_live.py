"""What is seen while training goes on: curves and proposals in a real MLflow database, a line on the terminal."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tasks.common.mlflow_layout import PARENT_VARIABLE, connect
from tasks.common.params import Params
from tasks.common.tracking import Tracker
from tasks.train_draft.live import show_steps
from tasks.train_draft.prepare import prepare_training
from tests.train_draft.conftest import DRAFT


@pytest.fixture
def tracked(params, project, empty_mlflow, monkeypatch) -> Params:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    shutil.copy(empty_mlflow, "mlflow.db")
    Path("dvc.yaml").write_text("stages: {train_draft: {cmd: python -m tasks.train_draft, params: [train_draft]}}")
    tracking = params.tracking.model_copy(update={"uri": f"sqlite:///{project}/mlflow.db"})
    return params.model_copy(update={"tracking": tracking})


def test_curves_and_proposals_are_in_mlflow_while_training_goes_on(tracked, capsys):
    client, seen = connect(tracked.tracking), {}

    def child():
        experiment = client.get_experiment_by_name("draftline").experiment_id
        return client.search_runs([experiment], "tags.stage = 'train_draft'")[0].info

    trainer, _ = prepare_training(tracked, DRAFT)
    steps = trainer.steps

    def watched():
        for step in steps():
            yield step
            losses = client.get_metric_history(child().run_id, "train/loss")
            seen[step.step] = (child().status, [point.step for point in losses])

    trainer.steps = watched
    with Tracker.stage("train_draft", tracked) as tracker:
        show_steps(trainer, tracked, tracker)
    assert seen == {step: ("RUNNING", list(range(1, step + 1))) for step in range(1, 9)}
    run = client.get_run(child().run_id)
    assert run.info.status == "FINISHED"
    assert {
        "train/accuracy_position_2",
        "train/gradient_norm",
        "train/learning_rate",
        "train/tokens_per_s",
        "heldout/loss",
        "heldout/predicted_accept_length/1_steps",
        "heldout/survival_position_0",
    } <= run.data.metrics.keys()
    heldout = client.get_metric_history(run.info.run_id, "heldout/predicted_accept_length/3_steps")
    assert [point.step for point in heldout] == [4, 8]

    table = json.loads(Path(client.download_artifacts(run.info.run_id, "proposals.json")).read_text())
    assert table["columns"] == ["step", "sample", "context", "target", "draft", "accepted"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["step"] for row in rows} == {4, 8}
    assert {row["sample"] for row in rows} == {"heldout-0", "heldout-1", "heldout-2"}
    for row in rows:
        same = [a == b for a, b in zip(row["target"].split(" | "), row["draft"].split(" | "), strict=False)]
        assert all(same[: row["accepted"]])
    said = capsys.readouterr()
    assert "step 4: held-out loss" in said.out


NUMBER = r"\d+\.\d\d"
LINE = re.compile(
    r"training: 8/8 step \d\d:\d\d<(?P<left>\d\d:\d\d) +[\d.]+(step/s|s/step), "
    rf"loss (?P<loss>{NUMBER}), accuracy (?P<accuracy>{NUMBER} {NUMBER} {NUMBER}), predicted AL (?P<predicted>{NUMBER}), "
    r"(?P<speed>\d+) tok/s(, (?P<memory>\d+\.\d) GiB)?$",
    re.MULTILINE,
)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_the_line_of_progress_says_what_the_curves_say(tracked, device, capsys):
    target = tracked.target.model_copy(update={"device": device})
    tracked = tracked.model_copy(update={"target": target})
    trainer, _ = prepare_training(tracked, DRAFT)
    with Tracker.stage("train_draft", tracked) as tracker:
        show_steps(trainer, tracked, tracker)
    line = LINE.search(capsys.readouterr().err)
    client = connect(tracked.tracking)
    experiment = client.get_experiment_by_name("draftline").experiment_id
    metrics = client.search_runs([experiment], "tags.stage = 'train_draft'")[0].data.metrics
    assert line["left"] == "00:00"
    assert line["loss"] == f"{metrics['train/loss']:.2f}"
    assert line["accuracy"] == " ".join(f"{metrics[f'train/accuracy_position_{i}']:.2f}" for i in range(3))
    assert line["predicted"] == f"{metrics['heldout/predicted_accept_length/3_steps']:.2f}"
    assert line["speed"] == f"{metrics['train/tokens_per_s']:.0f}"
    assert (line["memory"] is not None) == (device == "cuda")
    assert line["memory"] is None or line["memory"] == f"{metrics['train/gpu_memory_gib']:.1f}"
