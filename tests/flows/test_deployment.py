"""infra/prefect.yaml on a real local server and worker, with the commands of the README on other ports."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.common.mlflow_layout import connect
from tasks.common.params import load_params
from tests.flows.processes import get, processes_in, running, until
from tests.flows.toy_project import REPOSITORY


@pytest.fixture
def checkout(toy) -> Path:
    """The toy project with the flow's own code beside it, as in a checkout."""
    for folder in ("flows", "tasks"):
        shutil.copytree(REPOSITORY / folder, toy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    (toy / "infra").mkdir()
    shutil.copy(REPOSITORY / "infra/prefect.yaml", toy / "infra")
    return toy


@pytest.fixture
def prefect(checkout, api, environment, tmp_path):
    """Runs `prefect` commands against a server and a worker that live as long as the test."""
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    environment["PREFECT_API_URL"] = api

    def prefect(*arguments: str) -> str:
        done = subprocess.run(
            ["prefect", *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, (tmp_path / "worker").read_text()])
        return done.stdout

    worker = ("prefect", "worker", "start", "--pool", "draftline", "--type", "process")
    with running(*worker, environment=environment, log=tmp_path / "worker"):
        until(lambda: get(f"{api}/work_pools/draftline"))
        yield prefect


def test_a_deployed_pipeline_runs_and_is_cancelled(checkout, api, prefect):
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "infra/prefect.yaml")

    prefect("deployment", "run", "pipeline/draftline", "--watch", "--param", 'params={"until": "slow"}')
    assert Path("artifacts/slow/text").read_text() == "word firstslow"
    assert not Path("artifacts/train_draft").exists()
    client = connect(load_params().tracking)
    (tracked,) = client.search_runs([client.get_experiment_by_name("draftline").experiment_id])
    assert re.fullmatch(r"http://127.0.0.1:\d+/runs/flow-run/[0-9a-f-]{36}", tracked.data.tags["prefect.flow_run_url"])

    idle = set(processes_in(checkout))  # the worker, perhaps the end of the first run
    Path("seconds").write_text("600")
    run_id = re.search(r"UUID: ([0-9a-f-]{36})", prefect("deployment", "run", "pipeline/draftline"))[1]
    until(lambda: processes_in(checkout, "sleep"))
    prefect("flow-run", "cancel", run_id)
    until(lambda: set(processes_in(checkout)) <= idle)
    until(lambda: get(f"{api}/flow_runs/{run_id}")["state"]["name"] == "Cancelled")
    found = client.search_runs([tracked.info.experiment_id], order_by=["attributes.start_time DESC"])
    assert [run.info.status for run in found] == ["KILLED", "FINISHED"]
