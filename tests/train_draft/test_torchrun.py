"""The stage as people start it on several GPUs: `torchrun -m tasks.train_draft`, here two CPU processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tasks.common.files import write_json
from tasks.common.versions import VERSIONS, result_versions
from tasks.train_draft.finished import FINISHED
from tests.flows.processes import processes_in, until
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, SETTINGS

pytestmark = pytest.mark.faults
REPOSITORY = Path(__file__).parents[2]
ALONE = [sys.executable, "-m", "tasks.train_draft"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tasks.train_draft"]


@pytest.fixture
def start(params, project, empty_mlflow):
    """Start the stage by a command, with its output in a file."""
    shutil.copy(empty_mlflow, "mlflow.db")
    Path("dvc.yaml").write_text("stages: {train_draft: {cmd: python -m tasks.train_draft, params: [train_draft]}}")
    write_json(VERSIONS, result_versions())
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def start(command: list[str], **settings) -> subprocess.Popen:
        changed = SETTINGS | {"global_batch_size": 2} | settings
        sections = {"target": params.target.model_dump(), "train_draft": changed}
        Path("params.yaml").write_text(yaml.safe_dump(sections))
        with open("output.txt", "w") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    return start


def output() -> str:
    return Path("output.txt").read_text()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_what_one_does(start, parallel):
    assert start(ALONE).wait(600) == 0, output()
    alone = load_file(DRAFT / "draft.safetensors")
    (DRAFT / FINISHED).unlink()
    assert start(TWO, parallel=parallel).wait(600) == 0, output()
    assert output().count("step 8: held-out loss") == 1  # the first process speaks
    for name, tensor in load_file(DRAFT / "draft.safetensors").items():
        assert (tensor - alone[name]).norm() < 1e-3 * alone[name].norm(), name
    assert json.loads(Path("reports/train_draft.json").read_text())["curve"][-1]["step"] == 8
    assert start(ALONE).wait(600) == 0, output()  # as `dvc repro` would, which knows nothing of torchrun
    assert "trained already" in output()


def test_a_signal_to_torchrun_saves_and_the_next_start_goes_on(start, project):
    long = {"max_steps": 9000, "checkpoint_every": 9000, "evaluate_every": 9000}
    process = start(TWO, **long)
    until(lambda: re.search(r"training: [1-9]\d*/9000 step", output()))
    assert not list(CHECKPOINTS.glob("step-*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) != 0
    until(lambda: not processes_in(project), seconds=60)
    assert "another process ended" not in output()
    (saved,) = (int(path.stem[5:]) for path in CHECKPOINTS.glob("step-*.json"))
    assert saved > 0
    process = start(TWO, **long)
    until(lambda: f"resuming after step {saved} of 9000" in output())
    process.send_signal(signal.SIGTERM)
    process.wait(600)


def test_a_process_that_is_killed_ends_torchrun_with_a_sentence(start, project):
    process = start(TWO, max_steps=5000, checkpoint_every=5, evaluate_every=5000)
    until(lambda: (CHECKPOINTS / "step-00000005.json").exists())
    workers = [
        p for p in processes_in(project) if p.ppid() == process.pid and "torch.distributed.run" not in p.cmdline()
    ]
    ranks = {int(p.environ()["RANK"]): p for p in workers if "RANK" in p.environ()}
    ranks[1].kill()
    assert process.wait(600) == 1
    assert "process 0 of 2: another process ended in mid-step" in output()
    cause = output().partition("Root Cause")[2]
    assert "rank      : 1" in cause
    until(lambda: not processes_in(project), seconds=60)
