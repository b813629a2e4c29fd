"""What is true after one real run of the chain, and what each planted fault does to it."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.flows.processes import processes_in, until

pytestmark = pytest.mark.chain


def read(chain, name: str) -> dict:
    return json.loads(chain.path(name).read_text())


@contextmanager
def spoiled(chain, *names: str):
    """Files that a test may destroy; they, dvc.lock, params.yaml and all reports come back afterwards."""
    reports = chain.path("reports")
    names = (*names, "dvc.lock", "params.yaml")
    kept = {name: chain.path(name).read_bytes() for name in names}
    with TemporaryDirectory() as aside:
        shutil.copytree(reports, aside, dirs_exist_ok=True)
        try:
            yield
        finally:
            for name, content in kept.items():
                chain.path(name).write_bytes(content)
            shutil.rmtree(reports)
            shutil.copytree(aside, reports)


def test_every_gate_passed(chain):
    for gate in ("prompts", "responses", "hidden_states", "draft", "benchmark"):
        assert read(chain, f"reports/gates/{gate}.json")["passed"] is True
        assert "<html" in chain.path(f"reports/gates/{gate}.html").read_text()


def test_benchmark_reports_what_a_team_decides_on(chain):
    report = read(chain, "reports/benchmark.json")
    assert report["lossless"] is True
    assert 1 <= report["speculative"]["accept_length"] <= 4
    assert report["speculative"]["verify_rounds"] > 0
    assert report["speedup"] == pytest.approx(
        report["speculative"]["tokens_per_s"] / report["baseline"]["tokens_per_s"], rel=0.01
    )
    assert len(report["survival"]) == 3 and report["survival"] == sorted(report["survival"], reverse=True)
    assert report["settings"]["draft_tokens"] == 4
    assert {p.name for p in chain.path("reports/plots").glob("*.png")} >= {"survival.png", "throughput.png"}


def test_server_fed_the_draft_the_states_that_it_was_trained_on_and_drafted_what_was_exported(chain):
    report = read(chain, "reports/launch_server.json")
    parity, checks = report["parity"], report["checks"]
    assert parity["limit"] == 1e-4  # float32 throughout
    for slot in parity["slots"]:
        assert slot["relative_error_below"] <= 1e-3 < slot["next_best"]["relative_error"]
        assert checks[f"C3 slot {slot['slot']} (the dump)"] == "ok"
    assert checks["W3 served draft"] == checks["S4 speculation"] == checks["S4 acceptance"] == "ok"


def test_summary_names_what_was_reached(chain):
    # The last stage is named for the last time in the summary's own table; what was reached stands below it.
    summary = chain.path("flow.log").read_text().rpartition("gate_benchmark")[2].lower()
    for words in (
        "acceptance length",
        "times the plain server",
        "reports/benchmark.html",
        "artifacts/export",
        "make ui",
    ):
        assert words in summary


def test_dvc_has_nothing_to_do_after_the_flow_and_the_flow_nothing_after_dvc(chain):
    lock = chain.path("dvc.lock").read_bytes()
    assert "up to date" in chain.dvc("status").stdout
    assert "Data and pipelines are up to date" in chain.dvc("repro").stdout
    again = chain.python("flows.pipeline")
    assert again.returncode == 0, again.stdout[-3000:]
    rows = [line.split() for line in again.stdout.splitlines()]
    cached = {row[0] for row in rows if row[1:] == ["cached"]}
    assert cached == yaml.safe_load(chain.path("dvc.yaml").read_text())["stages"].keys()
    assert len(cached) == 14
    assert chain.path("dvc.lock").read_bytes() == lock


def due(chain) -> list[str]:
    """Stages that `dvc repro` would run."""
    return [
        line.split("'")[1]
        for line in chain.dvc("repro", "--dry").stdout.splitlines()
        if line.startswith("Running stage")
    ]


def test_a_learning_rate_is_due_from_training_on(chain):
    with spoiled(chain):
        chain.set(train_draft={"learning_rate": 5e-4})
        assert due(chain)[0] == "train_draft"


def test_a_plan_of_other_steps_trains_nothing_again(chain):
    with spoiled(chain):
        chain.set(serve={"num_steps": 2, "num_draft_tokens": 3})
        stages = due(chain)
        assert "train_draft" not in stages
        assert stages[-3:] == ["launch_server", "benchmark", "gate_benchmark"]


def test_a_prompt_is_due_from_collection_on(chain):
    name = "tasks/collect_prompts/builtin/chat.jsonl"
    with spoiled(chain, name):
        with open(chain.path(name), "a") as file:
            file.write(
                '{"id": "chat-999", "split": "train", "messages": [{"role": "user", "content": "Why is grass green?"}]}\n'
            )
        stages = due(chain)
        assert "prepare_target" not in stages
        assert "collect_prompts" in stages


SHARD = "artifacts/hidden_states/train/shard-00000.safetensors"


def flip_a_byte(path) -> int:
    """Of the sample whose index is returned."""
    tensors = load_file(path)
    last_row = tensors["aux"][tensors["sample_offsets"][6] - 1]  # the first rows are alike in all samples
    data = bytearray(path.read_bytes())
    data[data.index(last_row.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    return 5


def test_samples_of_a_corrupted_shard_fail_the_gate_in_dvc_and_are_named(chain):
    """One with a NaN, one whose layers are swapped, one with a flipped byte: one run of DVC finds all three."""
    with spoiled(chain, SHARD):
        tensors = load_file(chain.path(SHARD))
        aux, starts = tensors["aux"], tensors["sample_offsets"]
        aux[starts[3], 1, 3] = torch.nan
        aux[starts[4] : starts[5]] = aux[starts[4] : starts[5]].flip(1)
        save_file(tensors, chain.path(SHARD))
        spoilt = [3, 4, flip_a_byte(chain.path(SHARD))]
        result = chain.dvc("repro", "gate_hidden_states")
        assert result.returncode != 0
        assert "gate_hidden_states failed" in result.stdout
        samples = read(chain, "artifacts/hidden_states/train/shard-00000.json")["samples"]["id"]
        for index in spoilt:
            # As a finding's own line: what is said of the shard names its first samples whatever is wrong.
            assert f"\n    {samples[index]}: " in result.stdout, result.stdout[-3000:]


def test_a_shard_that_lost_rows_is_dumped_again(chain):
    whole = chain.path(SHARD).read_bytes()
    with spoiled(chain, SHARD):
        tensors = load_file(chain.path(SHARD))
        save_file({name: tensor[:-1].contiguous() for name, tensor in tensors.items()}, chain.path(SHARD))
        result = chain.dvc("repro", "gate_hidden_states")
        assert (result.returncode, chain.path(SHARD).read_bytes() == whole) == (0, True), result.stdout[-3000:]


def test_a_corrupted_shard_fails_the_flow(chain):
    with spoiled(chain, SHARD):
        flip_a_byte(chain.path(SHARD))
        result = chain.python("flows.pipeline")
        assert result.returncode == 1
        assert "The pipeline failed: stage gate_hidden_states" in result.stdout
        assert "Running stage 'gate_hidden_states'" in result.stdout
        assert "Running stage 'train_draft'" not in result.stdout


def written(chain) -> dict[Path, int]:
    """When each log was: a server that starts writes its log anew under the same name."""
    return {path: path.stat().st_mtime_ns for path in chain.path("logs").iterdir()}


def test_eagle_is_refused_before_any_server_starts(chain):
    before = written(chain)
    with spoiled(chain):
        chain.set(serve={"speculative_algorithm": "EAGLE"})
        result = chain.dvc("repro", "--single-item", "launch_server")
    assert result.returncode != 0
    assert "EAGLE for an EAGLE-3 draft: fc is never called" in result.stdout
    assert "serve.speculative_algorithm" in result.stdout
    assert written(chain) == before


def test_a_renamed_tensor_fails_the_draft_gate(chain):
    name = "artifacts/export/model.safetensors"
    with spoiled(chain, name):
        tensors = load_file(chain.path(name))
        tensors["fc_weight"] = tensors.pop("fc.weight")
        save_file(tensors, chain.path(name))
        result = chain.dvc("repro", "--single-item", "gate_draft")
    assert result.returncode != 0
    assert "fc.weight" in result.stdout


def test_mlflow_has_the_run_its_stages_and_its_data(chain):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{chain.path('mlflow.db')}")
    experiment = client.get_experiment_by_name("draftline").experiment_id
    runs = client.search_runs([experiment], max_results=200)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    parent = min(parents, key=lambda run: run.info.start_time)
    children = {run.info.run_name for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert {"regenerate_responses", "train_draft", "launch_server", "benchmark", "gate_benchmark"} <= children
    report = read(chain, "reports/benchmark.json")
    history = client.get_metric_history(parent.info.run_id, "accept_length/all")
    assert [(point.step, round(point.value, 4)) for point in history][:1] == [
        (4, report["speculative"]["accept_length"])
    ]
    assert parent.data.metrics["speedup"] == pytest.approx(report["speedup"], abs=1e-3)
    train = next(run for run in runs if run.info.run_name == "train_draft")
    lock = chain.path("dvc.lock").read_text()
    digests = [tag.value for item in train.inputs.dataset_inputs for tag in item.tags if tag.key == "dvc_md5"]
    assert digests and all(digest in lock for digest in digests)


def test_nothing_of_a_server_is_left(chain):
    until(lambda: processes_in(chain.root) == [], seconds=10)
