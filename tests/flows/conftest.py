"""Copies of the toy project, a real Prefect server, and an environment for the processes that tests start."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.processes import get, running, until
from tests.flows.toy_project import DVC_YAML, REPOSITORY, STEP, dvc_repro
from tests.ports import free_port_pair


@pytest.fixture(scope="session")
def toy_template(tmp_path_factory, empty_mlflow) -> Path:
    root = tmp_path_factory.mktemp("toy")
    params = "train_draft:\n  learning_rate: 0.001\n"
    files = {"dvc.yaml": DVC_YAML, "step.py": STEP, "seconds": "1", "word": "word ", "params.yaml": params}
    for name, text in files.items():
        (root / name).write_text(text)
    shutil.copy(empty_mlflow, root / "mlflow.db")
    for command in (
        ["git", "init", "--quiet"],
        [sys.executable, "-m", "dvc", "init", "--quiet"],
        [sys.executable, "-m", "dvc", "config", "core.analytics", "false"],
    ):
        subprocess.run(command, cwd=root, check=True)
    return root


@pytest.fixture(scope="session")
def reproduced_template(tmp_path_factory, toy_template, environment) -> Path:
    root = tmp_path_factory.mktemp("reproduced") / "toy"
    shutil.copytree(toy_template, root)
    dvc_repro(root, environment)
    return root


@pytest.fixture
def toy(tmp_path, toy_template, monkeypatch) -> Path:
    """A fresh copy of the project; the current directory."""
    return _copy(toy_template, tmp_path / "toy", monkeypatch)


@pytest.fixture
def reproduced(tmp_path, reproduced_template, monkeypatch) -> Path:
    """The project after a `dvc repro`; the current directory."""
    return _copy(reproduced_template, tmp_path / "toy", monkeypatch)


def _copy(template: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, root)
    params = root / "params.yaml"
    # An absolute path: one process keeps one MLflow store for each URI.
    params.write_text(f"{params.read_text()}tracking:\n  uri: sqlite:///{root}/mlflow.db\n")
    monkeypatch.chdir(root)
    return root


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory) -> Path:
    """Prefect's home for processes that tests start."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def environment(prefect_home) -> dict[str, str]:
    """For processes that tests start: this environment, none of the person's Prefect settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return {**kept, "PATH": path, "PREFECT_HOME": str(prefect_home), "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="session")
def api(environment, tmp_path_factory) -> Iterator[str]:
    """URL of a real `prefect server`, with a database of its own."""
    port = str(free_port_pair())
    home = tmp_path_factory.mktemp("server")
    environment = environment | {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = ("prefect", "server", "start", "--port", port, "--no-ui")
    with running(*command, environment=environment, log=home / "log"):
        until(lambda: get(f"http://127.0.0.1:{port}/api/health"))
        yield f"http://127.0.0.1:{port}/api"
