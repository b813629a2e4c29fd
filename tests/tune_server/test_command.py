"""The command line, and the command on real servers on the CPU."""

import json
import os
import re
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
from tasks.tune_server.__main__ import _nothing_found, _questions, _require_sensible, run_and_report
from tasks.tune_server.options import Device
from tasks.tune_server.search import Search
from tasks.tune_server.servers import Budget
from tasks.tune_server.space import Space
from tests.ports import free_port_pair
from tests.random_draft import VOCAB, write_random_draft
from tests.tune_server.bench import Bench

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("minutes", "concurrency", "said"),
    [
        (0, 1, "--minutes 0: a budget"),
        (float("nan"), 1, "--minutes nan: a budget"),
        (float("inf"), 1, "--minutes inf: a budget"),
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
        (
            {"context_length": 151},
            "none of the 6 held-out prompts fits into it with 48 tokens of an answer .* and 64 of a round",
        ),
        ({"max_total_tokens": 100}, "2 requests at once can come to 184 tokens.*Raise it to 184"),
    ],
)
def test_questions_must_fit_into_the_servers(tmp_path, monkeypatch, serve, said):
    monkeypatch.chdir(tmp_path)
    write_jsonl(RESPONSES / "heldout.jsonl", (row.to_row() for row in heldout()))
    with pytest.raises(DraftlineError, match=said):
        _questions(Params.model_validate({"serve": serve, "benchmark": {"concurrency": [1]}}), 2, 64)


def test_without_held_out_prompts_there_is_no_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(RESPONSES / "heldout.jsonl", [])
    with pytest.raises(DraftlineError, match=r"heldout\.jsonl: no held-out prompts, and the tuner asks them\."):
        _questions(Params(), 1, 64)


IDENTITY = {"machine": "an H200"}
EARLIER = ('{"of": "an earlier search"}', "serve: of an earlier search\n")


def earlier_reports() -> tuple[Path, Path]:
    Path("reports").mkdir()
    paths = Path("reports/tuned.json"), Path("reports/tuned_params.yaml")
    for path, text in zip(paths, EARLIER, strict=True):
        path.write_text(text)
    return paths


class Ending(Bench):
    """Ended by `error` when a batch of this rung begins."""

    def __init__(self, error: BaseException, rung: int):
        super().__init__(3000)
        self._error, self._rung = error, rung

    def measure(self, batch, questions, rung, ranked):
        if rung == self._rung:
            raise self._error
        return super().measure(batch, questions, rung, ranked)


@pytest.mark.parametrize("error", [lambda: DraftlineError("the plain server failed"), lambda: SystemExit(143)])
@pytest.mark.parametrize("rung", [0, 1])
def test_a_search_that_ends_early_reports_what_was_measured_and_still_fails(tmp_path, monkeypatch, error, rung):
    monkeypatch.chdir(tmp_path)
    error = error()
    params = Params.model_validate({"target": {"device": "cuda"}, "benchmark": {"concurrency": [1]}})
    tuned, profile = earlier_reports()
    search = Search(Space.of(params, 1, "LlamaForCausalLM", Device(None)), Ending(error, rung))
    with pytest.raises(type(error)) as ended:
        run_and_report(search, params, IDENTITY, 10, 1, Budget(600))
    notes = getattr(ended.value, "__notes__", [])
    if rung == 0:
        assert notes == []
        assert (tuned.read_text(), profile.read_text()) == EARLIER
        return
    assert notes == ["reports/tuned.json and reports/tuned_params.yaml hold what was measured by then."]
    found = read_json(tuned)
    assert found["complete"] is False
    assert found["settings"]["machine"] == "an H200"  # named at the start: a driver that fails by now costs no report
    assert found["ended"].startswith(f"Ended early, in rung {rung}: ")
    assert "# Ended early, in rung 1" in profile.read_text()
    assert yaml.safe_load(profile.read_text())["serve"]["num_steps"] == found["best"]["steps"]


@pytest.mark.parametrize(
    ("law", "why"),
    [
        ({"budget_s": 24, "start_s": 10.0}, "0.4 minutes are too short to measure 5/4/8 (automatic), 2/1/3: "),
        (
            {"broken": lambda candidate: True},
            "Every other server that params.yaml would take was dropped: see above why.",
        ),
    ],
)
def test_a_search_that_compared_nothing_leaves_the_reports_of_an_earlier_one(tmp_path, monkeypatch, law, why):
    monkeypatch.chdir(tmp_path)
    params = Params.model_validate({"benchmark": {"concurrency": [1]}})
    over = Space.of(params, 1, "LlamaForCausalLM", Device(None))
    search = Search(over, Bench(capacity=2, starts_together=False, **law))
    assert "tuned.json" not in _nothing_found(search)
    reports = earlier_reports()
    assert run_and_report(search, params, IDENTITY, 10, 1, Budget(600))["best"] is None
    assert tuple(path.read_text() for path in reports) == EARLIER
    assert _nothing_found(search).startswith(why)
    assert _nothing_found(search).endswith("reports/tuned.json is still an earlier search's.")


def test_a_search_that_ran_to_its_end_is_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = Params.model_validate({"benchmark": {"concurrency": [1]}})
    search = Search(Space.of(params, 1, "LlamaForCausalLM", Device(None)), Bench(300))
    assert run_and_report(search, params, IDENTITY, 10, 1, Budget(600)) == read_json(Path("reports/tuned.json"))
    assert read_json(Path("reports/tuned.json"))["complete"] is True
    assert "Ended early" not in Path("reports/tuned_params.yaml").read_text()


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
def test_a_real_search_that_no_server_is_up_in_time_for_fails_and_leaves_earlier_reports(served):
    reports = earlier_reports()
    short = started(0.1)
    said, log = short.communicate()
    assert short.returncode == 1, log
    assert re.search(r"no server with the draft was up and warm; at least --minutes \d+ is needed", log), log
    assert "The best" not in said
    assert tuple(path.read_text() for path in reports) == EARLIER
    assert not list(Path("logs").glob("server-*.json"))


@pytest.mark.faults
def test_a_search_on_real_servers_after_one_that_was_killed(served):
    killed = started(10)
    while not list(Path("logs").glob("server-speculative-*.json")):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    found = started(4)
    said, log = found.communicate()
    assert found.returncode == 0, log
    assert "rung 0: 28/28 answer" in log  # 2 servers, 2 questions each to warm up and 4 in three repeats
    assert "killed a baseline server that a dead run left" in log
    assert "killed a speculative server that a dead run left" in log

    report = read_json(Path("reports/tuned.json"))
    rows = {row["row"]: row for row in report["comparison"]}
    current = rows["current"]["result"]
    assert rows["current"]["name"] == "3/1/4"
    assert 1 <= current["accept_length"] < 1.5  # a random draft
    speed, ratios = current["speedup"], current["speedup"]["ratios"]
    assert len(ratios) == speed["repeats"] == 3
    assert [speed["min"], speed["median"], speed["max"]] == sorted(ratios)
    # Every repeat asks for the same answers: over all of them the ratio lies between those of the repeats.
    pooled = current["tokens_per_s"] / current["plain_tokens_per_s"]
    assert speed["min"] - 0.01 <= pooled <= speed["max"] + 0.01
    assert report["best"]["steps"] <= 3
    assert "train_draft.ttt_length" in said and "The best plan, to copy into params.yaml" in said
    serve = yaml.safe_load(Path("reports/tuned_params.yaml").read_text())["serve"]
    assert Params.model_validate(served.model_dump() | {"serve": serve}).serve.num_steps == report["best"]["steps"]

    assert not list(Path("logs").glob("server-*.json"))
    assert all(port_is_free(served.serve.port + offset) for offset in range(4))
