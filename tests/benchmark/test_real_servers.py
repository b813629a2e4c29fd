"""`python -m tasks.benchmark` with real SGLang servers over a tiny target and random drafts, and what ends it early."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tasks.benchmark.arms import Arm
from tasks.benchmark.measure import measure
from tasks.benchmark.partial import Partial
from tasks.benchmark.questions import loads_of
from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json, write_json
from tasks.common.params import PARAMS, load_params
from tasks.common.server_plan import baseline_plan, flag
from tasks.common.server_session import LOGS, ServerRecord, port_is_free
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import TARGET, target_contract
from tasks.common.versions import VERSIONS, result_versions
from tests.ports import free_port_pair
from tests.random_draft import write_random_draft

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
QUESTIONS = ["the quick brown fox", "what is the capital of France?", "Paris is the capital"]


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_model_folder):
    """A folder with params.yaml, a prepared target, an export, somebody's draft and a set of questions, to work in."""
    from tasks.prepare_target.prepare import prepare_target

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("benchmark"))
        rows = [{"question_id": n, "category": "c", "turns": [text]} for n, text in enumerate(QUESTIONS)]
        Path("set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections = {
            "target": {"model": str(tiny_model_folder)},
            "contract": {"aux_layer_ids": [1, 3, 4]},
            "serve": {"port": free_port_pair(), "context_length": 256, "max_total_tokens": 4096},
            "benchmark": {
                "sets": {"small": "set.jsonl"},
                "num_prompts": 3,
                "max_new_tokens": 24,
                "concurrency": [1, 3],
                "temperatures": [0.0, 1.0],
            },
        }
        PARAMS.write_text(yaml.safe_dump(sections))
        params = load_params()
        prepare_target(params.target, TARGET)
        write_random_draft(Path("artifacts/export"), target_contract(params.contract))
        shutil.copytree("artifacts/export", "theirs")
        (Path("theirs") / "draftline.json").unlink()
        write_json(REPORTS / "train_draft.json", {"predicted_accept_lengths": [1.1, 1.1, 1.1]})
        write_json(VERSIONS, result_versions())
        yield Path.cwd()


def benchmark(**options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.benchmark"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def set_benchmark(**values) -> None:
    sections = yaml.safe_load(PARAMS.read_text())
    sections["benchmark"] |= values
    PARAMS.write_text(yaml.safe_dump(sections))


def test_sets_concurrencies_temperatures_and_somebody_elses_draft_in_one_table(project):
    set_benchmark(drafts={"theirs": "theirs"})
    run = benchmark()
    output, _ = run.communicate(timeout=560)
    set_benchmark(drafts={})
    assert run.returncode == 0, output[-4000:]
    report = read_json(REPORTS / "benchmark.json")
    cells = {(row["draft"], row["concurrency"], row["temperature"]): row for row in report["cells"]}
    assert cells.keys() == {(d, c, t) for d in ("speculative", "theirs") for c, t in ((1, 0), (3, 0), (1, 1))}
    for row in cells.values():
        assert row["verify_rounds"] > 0 and row["repeats"] == 3
        assert row["accept_length"] == pytest.approx(1 + row["correct_drafts"] / row["verify_rounds"], abs=1e-4)
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"]
        assert row["baseline_inter_token_ms"]["p50"] > 0
    # The same files, so greedily the same rounds: one draft is not credited with the other's answers.
    ours, theirs = cells["speculative", 1, 0], cells["theirs", 1, 0]
    assert (ours["verify_rounds"], ours["correct_drafts"]) == (theirs["verify_rounds"], theirs["correct_drafts"])
    assert report["lossless"] and cells["theirs", 3, 0]["agreement"] == 1.0
    # Three questions are asked over and over again, and each time computed.
    assert all(cell["first_token_ms"]["p50"] > 1 for cell in cells.values())
    assert report["settings"]["conditions"]["max_running_requests"] == 8
    page = (REPORTS / "benchmark.html").read_text()
    assert "theirs" in page and "http://" not in page and "https://" not in page
    assert not (REPORTS / "benchmark.partial.json").exists()


def test_a_baseline_with_other_flags_is_refused(project):
    """With graphs off in one arm alone the speed-up would be the flag's (S6)."""
    params = load_params()
    slower = baseline_plan(params, port=params.serve.port + 1).adding((flag("--disable-cuda-graph", reason="planted"),))
    arms = [Arm("baseline", slower), Arm("speculative", speculative_plan(params))]
    with pytest.raises(DraftlineError, match="does not run under the same conditions"):
        measure(arms, loads_of(params), params, Partial(params))
    assert port_is_free(params.serve.port) and port_is_free(params.serve.port + 1)


def test_of_servers_that_run_one_after_the_other_none_is_measured_before_all_are_compared(project, monkeypatch):
    monkeypatch.setattr("tasks.benchmark.measure.fit_together", lambda *_: False)
    params = load_params()
    slower = speculative_plan(params).adding((flag("--disable-cuda-graph", reason="planted"),))
    arms = [Arm("baseline", baseline_plan(params, port=params.serve.port + 1)), Arm("speculative", slower)]
    earlier = REPORTS / "benchmark.json"
    write_json(earlier, {"of": "an earlier benchmark"})
    with pytest.raises(DraftlineError, match="does not run under the same conditions"), Partial(params) as partial:
        measure(arms, loads_of(params), params, partial)
    assert earlier.exists() and not (REPORTS / "benchmark.partial.json").exists()
    earlier.unlink()


def test_a_start_that_fails_leaves_the_reports_that_there_were(project):
    kept = [REPORTS / name for name in ("benchmark.json", "benchmark.partial.json")]
    for path in kept:
        write_json(path, {"of": "an earlier benchmark"})
    with socket.create_server(("127.0.0.1", load_params().serve.port + 1)):
        run = benchmark()
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 1 and "is in use by" in output, output[-4000:]
    assert all(path.exists() for path in kept)
    for path in kept:
        path.unlink()


def wait_until_measuring(run: subprocess.Popen) -> None:
    """Until a first load was asked of all servers, so that something is worth keeping."""
    deadline = time.monotonic() + 300
    while not (REPORTS / "benchmark.partial.json").exists():
        assert run.poll() is None, run.stdout.read()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def servers() -> list[ServerRecord]:
    return [ServerRecord.read(path) for path in LOGS.glob("server-*.json")]


def test_a_server_that_dies_ends_it_with_what_was_measured_and_a_killed_benchmark_leaves_nothing_for_long(project):
    set_benchmark(repeats=400)
    run = benchmark()
    wait_until_measuring(run)
    (drafted,) = [record for record in servers() if record.kind == "speculative"]
    os.kill(drafted.processes[-1].pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1 and "Traceback" not in output
    assert "the speculative server" in output or "no answer" in output
    kept = read_json(REPORTS / "benchmark.partial.json")
    assert kept["complete"] is False and kept["passes"] and kept["why"] in " ".join(output.split())
    assert servers() == []

    run = benchmark()
    (REPORTS / "benchmark.partial.json").unlink()
    wait_until_measuring(run)
    left = [process for record in servers() for process in record.processes]
    run.kill()
    run.communicate()
    assert any(process.is_alive for process in left)
    assert read_json(REPORTS / "benchmark.partial.json")["why"] == "it still runs, or was killed without a word"
    next_run = benchmark()
    deadline = time.monotonic() + 120
    while any(process.is_alive for process in left):
        assert time.monotonic() < deadline and next_run.poll() is None
        time.sleep(0.1)
    next_run.terminate()
    output, _ = next_run.communicate(timeout=60)
    set_benchmark(repeats=3)
    # It may have been told to end between the last process and its record, which the next start removes.
    assert not any(process.is_alive for record in servers() for process in record.processes)
