"""dvc.yaml against the code: every stage depends on all the code that can change its result."""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

from tasks.common.dvc_files import DvcFiles
from tasks.common.measured_draft import params_sha256
from tasks.common.params import Params, Serve

ROOT = Path(__file__).parents[1]
STAGES: dict[str, dict] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
ORDER = [
    "verify_environment",
    "prepare_target",
    "collect_prompts",
    "gate_prompts",
    "regenerate_responses",
    "gate_responses",
    "dump_hidden_states",
    "gate_hidden_states",
    "train_draft",
    "export_draft",
    "gate_draft",
    "launch_server",
    "benchmark",
    "gate_benchmark",
]
# Shared by every stage, and no result depends on it: a change here must not cost 50 hours of regeneration.
PLUMBING = {
    f"tasks/common/{name}.py"
    for name in (
        "benchmark_names",
        "errors",
        "files",
        "forms",
        "git",
        "params",
        "params_errors",
        "params_texts",
        "progress",
        "stage",
        "tracking",
        "training_report",
        "headline",
        "dvc_files",
        "mlflow_layout",
        "versions",
    )
}


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    if (path / "__init__.py").exists():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else None


def imported(path: Path) -> set[Path]:
    """Files of this project that a module imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {file for name in names if name.startswith("tasks.") and (file := module_file(name))}


def code_of(stage: str) -> set[str]:
    """The code that a stage runs, found by its imports; its own package counts as one."""
    start = ROOT / "tasks" / stage / "__main__.py"
    probes = (ROOT / "tasks" / stage / "probes").glob("*.py")  # run by name, in processes of their own
    todo, seen = [start if start.exists() else ROOT / "tasks" / f"{stage}.py", *probes], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imported(path)
    code = set()
    for path in seen:
        relative = path.relative_to(ROOT)
        own = relative.is_relative_to(f"tasks/{stage}")
        empty = path.name == "__init__.py" and not imported(path) and not own
        if not empty and relative.as_posix() not in PLUMBING:
            code.add(f"tasks/{stage}" if own else relative.as_posix())
    return code


def test_stages_stand_in_the_order_of_the_chain():
    assert list(STAGES) == ORDER


@pytest.mark.parametrize("stage", ORDER)
def test_a_stage_depends_on_all_the_code_that_it_runs(stage):
    listed = {dep for dep in STAGES[stage]["deps"] if dep.startswith("tasks/") and dep.endswith((".py", stage))}
    assert listed == code_of(stage)


@pytest.mark.parametrize("stage", ORDER)
def test_a_stage_is_run_by_its_name(stage):
    assert STAGES[stage]["cmd"] == f"python -m tasks.{stage}"


@pytest.mark.parametrize("stage", ORDER)
def test_parameters_named_exist(stage):
    for name in STAGES[stage]["params"]:
        value = Params()
        for part in name.split("."):
            value = getattr(value, part)


GATED = {
    "artifacts/prompts": "prompts",
    "artifacts/responses": "responses",
    "artifacts/hidden_states": "hidden_states",
    "artifacts/export": "draft",
}
READERS = [
    (stage, artifact)
    for stage in ORDER
    for artifact in GATED
    if artifact in STAGES[stage]["deps"] and not stage.startswith("gate_")
]


def outputs(stage: str) -> set[str]:
    """An output stands as its path, or as its path with settings."""
    listed = [*STAGES[stage].get("outs", []), *STAGES[stage].get("metrics", [])]
    return {path for out in listed for path in ([out] if isinstance(out, str) else out)}


@cache
def all_deps(stage: str) -> frozenset[str]:
    """Dependencies of a stage and of every stage that runs before it for its sake."""
    deps = frozenset(STAGES[stage]["deps"])
    return deps.union(*(all_deps(other) for other in ORDER if outputs(other) & deps))


@pytest.mark.parametrize(("stage", "artifact"), READERS)
def test_what_a_gate_checks_is_read_only_after_its_verdict(stage, artifact):
    assert f"reports/gates/{GATED[artifact]}.json" in all_deps(stage)


def test_every_gated_artifact_has_a_reader():
    assert {artifact for _, artifact in READERS} == GATED.keys()


def test_versions_are_a_dependency_of_what_computes_and_free_disk_of_nothing():
    readers = {stage for stage, spec in STAGES.items() if "artifacts/environment/versions.json" in spec["deps"]}
    assert {
        "prepare_target",
        "regenerate_responses",
        "dump_hidden_states",
        "train_draft",
        "launch_server",
        "benchmark",
    } <= readers
    assert not any("reports/environment.json" in spec["deps"] for spec in STAGES.values())


def test_the_port_changes_no_result():
    assert not any(
        name in ("serve", "serve.port")
        for stage, spec in STAGES.items()
        for name in spec["params"]
        if stage != "verify_environment"
    )


def test_how_many_tokens_are_drafted_a_round_trains_nothing_again(monkeypatch):
    """Such a plan is what the tuner writes; only what serves the draft, or judges it as it is served, runs behind it."""
    chain = {"serve.num_steps", "serve.eagle_topk", "serve.num_draft_tokens"}
    due = {stage for stage, spec in STAGES.items() if chain & set(spec["params"])}
    assert due == {"gate_draft", "launch_server", "benchmark", "gate_benchmark"}
    monkeypatch.chdir(ROOT)
    assert not due & (DvcFiles().upstream("export_draft") | {"export_draft"})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("stage", ["benchmark", "gate_benchmark"])
def test_a_benchmark_is_another_where_it_is_measured_again(stage):
    """Else its gate would fail on a change that `dvc repro` measures nothing for."""

    def changed(name: str) -> Params:
        return Params().model_copy(update={"serve": Serve().model_copy(update={name: "another"})})

    differing = {name for name in Serve.model_fields if params_sha256(changed(name)) != params_sha256(Params())}
    assert {f"serve.{name}" for name in differing} == {
        name for name in STAGES[stage]["params"] if name.startswith("serve.")
    }
    assert "benchmark" in STAGES[stage]["params"]
