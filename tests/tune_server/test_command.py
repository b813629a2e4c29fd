"""The command line, and the command on real servers on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_jsonl
from tasks.common.params import Params
from tasks.common.responses import RESPONSES, Response
from tasks.common.server_session import port_is_free
from tasks.common.target import TARGET, target_contract
from tasks.prepare_target.prepare import prepare_target
from tasks.tune_server.__main__ import _questions, _require_sensible
from tests.ports import free_port_pair
from tests.random_draft import VOCAB, write_random_draft

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("minutes", "concurrency", "said"),
    [
        (0, 1, "--minutes 0: a budget"),
        (float("nan"), 1, "--minutes nan: a budget"),
        (1, 0, "--concurrency 0: at least one"),
        (1, 9, r"--concurrency 9: .*at most 8.*Set serve.max_running_requests to at least 9"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_starts(minutes, concurrency, said):
    with pytest.raises(DraftlineError, match=said):
        _require_sensible(minutes, concurrency, Params())


def heldout() -> list[Response]:
    prompts = torch.randint(3, VOCAB, (6, 40), generator=torch.Generator().manual_seed(1)).tolist()
    return [Response(f"heldout-{n}", "chat", [], prompt, [5, 6], "", "length") for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ({"context_length": 50}, "none of the 6 held-out prompts fits"),
        ({"max_total_tokens": 100}, "2 requests at once can come to 176 tokens.*Raise it to 176"),
    ],
)
def test_questions_must_fit_into_the_servers(tmp_path, monkeypatch, serve, said):
    monkeypatch.chdir(tmp_path)
    write_jsonl(RESPONSES / "heldout.jsonl", (row.to_row() for row in heldout()))
    with pytest.raises(DraftlineError, match=said):
        _questions(Params.model_validate({"serve": serve, "benchmark": {"concurrency": [1]}}), 2)


@pytest.fixture
def served(tmp_path, monkeypatch, tiny_model_folder) -> Params:
    """Tiny target, random draft and held-out answers in the current directory; few candidates, short answers."""
    monkeypatch.chdir(tmp_path)
    params = Params.model_validate(
        {
            "target": {"model": str(tiny_model_folder)},
            "contract": {"aux_layer_ids": [1, 3, 4]},
            "train_draft": {"ttt_length": 3},
            "serve": {
                "port": free_port_pair(),
                "context_length": 256,
                "max_total_tokens": 2048,
                "max_running_requests": 1,
            },
            "benchmark": {"concurrency": [1], "max_new_tokens": 8},
        }
    )
    Path("params.yaml").write_text(yaml.safe_dump(json.loads(params.model_dump_json())))
    prepare_target(params.target, TARGET)
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))
    write_jsonl(RESPONSES / "heldout.jsonl", (row.to_row() for row in heldout()))
    return params


def started(minutes: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "tasks.tune_server", "--minutes", str(minutes)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.faults
def test_a_search_on_real_servers_after_one_that_was_killed(served):
    killed = started(10)
    while not list(Path("logs").glob("server-speculative-*.json")):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    found = started(6)
    said, log = found.communicate()
    assert found.returncode == 0, log
    assert "killed a baseline server that a dead run left" in log
    assert "killed a speculative server that a dead run left" in log

    report = read_json(Path("reports/tuned.json"))
    rows = {row["row"]: row for row in report["comparison"]}
    current = rows["current"]["result"]
    assert rows["current"]["name"] == "3/1/4"
    assert 1 <= current["accept_length"] < 1.5  # a random draft
    assert current["speedup"]["min"] <= current["speedup"]["median"] <= current["speedup"]["max"]
    assert current["tokens_per_s"] / current["plain_tokens_per_s"] == pytest.approx(
        current["speedup"]["median"], rel=0.8
    )
    assert report["best"]["steps"] <= 3
    assert "train_draft.ttt_length" in said and "The best plan, to copy into params.yaml" in said
    serve = yaml.safe_load(Path("reports/tuned_params.yaml").read_text())["serve"]
    assert Params.model_validate(served.model_dump() | {"serve": serve}).serve.num_steps == report["best"]["steps"]

    assert not list(Path("logs").glob("server-*.json"))
    assert all(port_is_free(served.serve.port + offset) for offset in range(4))
