"""One real run of the whole pipeline at a small size, in a clone of this checkout: real model, SGLang, DVC, Prefect."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.ports import free_port_pair

REPOSITORY = Path(__file__).parents[2]
# Sizes of the run; every stage does what it does at full size.
SMALL = {
    "prompts": {"max_train": 48, "max_heldout": 12},
    "regenerate": {"max_new_tokens": 32},
    "train_draft": {"max_steps": 40, "checkpoint_every": 10, "evaluate_every": 20},
    "benchmark": {"num_prompts": 4, "max_new_tokens": 24, "concurrency": [1], "warmup_prompts": 1},
    "gates": {"min_prompts": 4, "min_predicted_accept_length": 1.0, "min_accept_length": 1.0},
}


@dataclass
class Project:
    """A clone with its own parameters, artifacts and DVC cache."""

    root: Path
    environment: dict[str, str]

    def python(self, *arguments: str, timeout: int = 1200) -> subprocess.CompletedProcess[str]:
        """Run `python -m ...` in the clone; stdout and stderr together."""
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def dvc(self, *arguments: str, timeout: int = 1200) -> subprocess.CompletedProcess[str]:
        return self.python("dvc", *arguments, timeout=timeout)

    def path(self, name: str) -> Path:
        return self.root / name

    def set(self, **sections: dict) -> None:
        """Change values in params.yaml."""
        path = self.path("params.yaml")
        params = yaml.safe_load(path.read_text())
        for section, values in sections.items():
            params[section] |= values
        path.write_text(yaml.safe_dump(params, sort_keys=False))


def clone_into(root: Path) -> Project:
    """A clone at the small size in which nothing has run yet."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        if (REPOSITORY / name).is_file() and not name.startswith(("reports/", "tests/", "dvc.lock")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, root / name)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "DRAFTLINE_"))}
    project = Project(root, environment | {"PATH": os.pathsep.join(path), "HOME": str(root.parent)})
    project.set(**SMALL, serve={"port": free_port_pair()})
    return project


@pytest.fixture
def small_clone(tmp_path) -> Project:
    """A clone of its own for a test that runs stages itself."""
    return clone_into(tmp_path / "draftline")


@pytest.fixture(scope="session")
def chain(tmp_path_factory) -> Project:
    """One clone for all tests that look at a whole run, after `python -m flows.pipeline`."""
    project = clone_into(tmp_path_factory.mktemp("chain") / "draftline")
    done = project.python("flows.pipeline", timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:]
    project.path("flow.log").write_text(done.stdout)
    return project
