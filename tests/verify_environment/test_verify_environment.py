"""The stage itself, run as DVC runs it, in a copy of the project."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.common.versions import require_verified_versions, result_versions
from tasks.verify_environment.report import Report
from tests.ports import free_port_pair

ROOT = Path(__file__).parents[2]
VERSIONS = Path("artifacts/environment/versions.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


@pytest.fixture
def project(tmp_path):
    """A copy of the project with these parameters changed."""

    def make(**sections: dict) -> Path:
        for folder in ("tasks", "infra"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        params = yaml.safe_load((ROOT / "params.yaml").read_text())
        for section, values in sections.items():
            params[section].update(values)
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
        return tmp_path

    return make


def run_stage(folder: Path, *, python: str = sys.executable, search: str | None = None):
    """`python -m tasks.verify_environment` in `folder`; `search` becomes PYTHONPATH, `path` goes before PATH."""
    return subprocess.run(
        [python, "-m", "tasks.verify_environment"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": search or str(folder / "infra" / "sglang_cpu"),
        },
        capture_output=True,
        text=True,
    )


def test_the_embedded_default_is_verified_and_planned(project):
    folder = project(serve={"port": free_port_pair()})
    run = run_stage(folder)
    assert run.returncode == 0, run.stdout + run.stderr
    report = Report.model_validate_json((folder / "reports" / "environment.json").read_text())
    found = {check.id: check for check in report.checks}
    assert {check.id for check in report.checks if check.verdict == "error"} == set()
    assert found["kernels"].verdict == found["attention"].verdict == "ok"
    assert "its class in SGLang has the hook" in found["eagle3_capture"].found
    assert found["aux_layers"].found.startswith("outputs [1, 14, 26]")
    stages = {stage.stage: stage for stage in report.plan.stages}
    assert stages["dump_hidden_states"].disk_bytes == stages["dump_hidden_states"].tokens * 9221
    assert "dump_hidden_states" in run.stdout

    written = json.loads((folder / VERSIONS).read_text())
    assert written == result_versions()
    require_verified_versions(folder / VERSIONS)


def test_all_failures_are_told_at_once_and_no_versions_are_recorded(project, tmp_path):
    """A broken sglang, a taken port, more states than any disk holds, a set and a draft that are not there."""
    broken = tmp_path / "broken" / "sglang" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        folder = project(
            target={"model": "model"},
            serve={"port": taken.getsockname()[1]},
            regenerate={"max_new_tokens": 10**9},
            train_draft={"draft_vocab_size": 320},
            benchmark={"sets": {"mine": "nowhere.jsonl"}, "drafts": {"theirs": "artifacts/draft"}},
        )
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        (folder / VERSIONS).parent.mkdir(parents=True)
        (folder / VERSIONS).write_text("{}")
        run = run_stage(folder, search=f"{broken.parents[1]}{os.pathsep}{folder / 'infra' / 'sglang_cpu'}")
    assert run.returncode == 1
    failed = {line.split(":")[0].removeprefix("- ") for line in run.stderr.splitlines() if line.startswith("- ")}
    assert failed == {"sglang", "lengths", "disk", "ports", "question sets", "other drafts"}
    assert "benchmark.sets.mine: 'nowhere.jsonl' is not there" in run.stderr
    assert f"pid {os.getpid()}" in run.stderr
    assert "cache.type hardlink" in run.stderr
    assert "python" in run.stdout  # the table came first, whole
    assert "train_draft" in run.stdout
    assert Report.model_validate_json((folder / "reports" / "environment.json").read_text()).verdict == "error"
    assert not (folder / VERSIONS).exists()


def test_a_python_without_the_packages_is_told_what_to_do(project, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    run = run_stage(project(), python=str(tmp_path / "bare" / "bin" / "python"))
    assert run.returncode == 1
    assert "has no module" in run.stderr
    assert ".venv/bin first on PATH" in run.stderr
    assert "Traceback" not in run.stderr
