"""The command line, and the command on real servers on the CPU."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json, write_jsonl
from tasks.common.machine import machine
from tasks.common.params import Params
from tasks.common.responses import RESPONSES, Response
from tasks.common.server_plan import baseline_plan, flag
from tasks.common.server_session import port_is_free
from tasks.common.target import TARGET, target_contract
from tasks.prepare_target.prepare import prepare_target
from tasks.profile_server.__main__ import PARTIAL, REPORT, _requests, main
from tasks.profile_server.decoding import ProfiledServer, _tokens_that_last, step_ms
from tasks.profile_server.parts import take_apart
from tasks.profile_server.profile import TRACES, Profile
from tasks.profile_server.trace import Trace
from tests.ports import free_port_pair
from tests.profile_server.test_parts import PLAIN
from tests.random_draft import VOCAB, write_random_draft

ROOT = Path(__file__).parents[2]


def params_with(most: int) -> Params:
    return Params.model_validate({"serve": {"max_running_requests": most}})


def test_by_default_no_more_requests_than_a_server_runs_at_once():
    assert _requests(None, params_with(8)) == [1, 4]
    assert _requests(None, params_with(16)) == [1, 4, 16]


def test_the_command_of_the_documentation_runs_on_the_default_parameters():
    command = re.search(
        r"tasks.profile_server --requests ([\d ]+)", (ROOT / "infra" / "docs" / "profile.md").read_text()
    )
    asked = [int(count) for count in command[1].split()]
    assert _requests(asked, Params()) == asked


def test_more_requests_than_a_server_runs_at_once_are_refused_with_the_fix():
    with pytest.raises(
        DraftlineError, match=r"--requests 64: .*at most 16.*Set serve.max_running_requests to at least 64"
    ):
        _requests([1, 64], params_with(16))


def test_no_request_at_all_is_refused():
    with pytest.raises(DraftlineError, match="--requests 0: at least one"):
        _requests([0, 4], params_with(16))


def test_without_held_out_prompts_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").touch()
    write_jsonl(RESPONSES / "heldout.jsonl", [])
    with pytest.raises(
        DraftlineError, match=r"heldout\.jsonl: no held-out prompts, .* `dvc repro regenerate_responses`"
    ):
        main(None)
    assert not Path("logs").exists()


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model_folder) -> Params:
    """Tiny target, random draft and held-out answers, in a folder of their own that is the current directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("profiled"))
        sections = {
            "target": {"model": str(tiny_model_folder)},
            "contract": {"aux_layer_ids": [1, 3, 4]},
            "serve": {
                "port": free_port_pair(),
                "context_length": 1024,
                "max_total_tokens": 8192,
                "max_running_requests": 2,
            },
        }
        params = Params.model_validate(sections)
        Path("params.yaml").write_text(yaml.safe_dump(json.loads(params.model_dump_json())))
        prepare_target(params.target, TARGET)
        write_random_draft(Path("artifacts/export"), target_contract(params.contract))
        write_jsonl(RESPONSES / "heldout.jsonl", (row.to_row() for row in _answers()))
        yield params


def _answers() -> list[Response]:
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    return [Response(f"heldout-{n}", "chat", [], prompt, [5, 6], "", "length") for n, prompt in enumerate(prompts)]


def test_where_the_second_server_fails_what_was_measured_of_the_first_is_kept_until_both_are(served, monkeypatch):
    def profile(plan, *_):
        if plan.kind == "speculative":
            raise DraftlineError("the speculative server\ndied")
        return [Profile(1, 1.6, take_apart(Trace.read(PLAIN), "baseline", 16), PLAIN)]

    monkeypatch.setattr("tasks.profile_server.profile.profile", profile)
    with pytest.raises(DraftlineError) as failed:
        main([1])
    assert failed.value.__notes__ == [
        f"What was measured of the plain server is kept in {PARTIAL}, marked as incomplete."
    ]
    kept = read_json(PARTIAL)
    assert (kept["complete"], kept["why"]) == (False, "the speculative server died")
    assert (kept["by_requests"][0]["plain_step_ms"], kept["settings"]["machine"]) == (1.6, machine("cpu"))
    assert not REPORT.exists()


def test_what_is_kept_of_an_earlier_draft_does_not_outlive_the_next_measurement(served, monkeypatch):
    def profile(*_):
        raise DraftlineError("the baseline server died")

    write_json(PARTIAL, {})
    monkeypatch.setattr("tasks.profile_server.profile.profile", profile)
    with pytest.raises(DraftlineError):
        main([1])
    assert not PARTIAL.exists()


@pytest.mark.faults
def test_both_servers_are_timed_and_taken_apart(served):
    command = [sys.executable, "-m", "tasks.profile_server", "--requests", "1", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "break-even acceptance length" in done.stdout
    assert f"{REPORT}: the same for programs; {TRACES}: the traces" in done.stdout
    rows = read_json(Path("reports/profile.json"))["by_requests"]
    assert [row["requests"] for row in rows] == [1, 2]
    for row in rows:
        assert row["break_even_accept_length"] == pytest.approx(row["round_ms"] / row["plain_step_ms"], rel=0.01)
        assert row["round"]["draft_passes"] == 2
        for kind in ("plain_step", "round"):
            taken = row[kind]
            assert Path(taken["trace"]).is_file()
            assert taken["traced_steps"] >= 10
            assert all(part["host_ms"] > 0 for part in taken["parts"])
            assert sum(part["host_share"] for part in taken["parts"]) == pytest.approx(1, abs=0.1)
            assert "gpu_idle_ms" not in taken
    assert port_is_free(served.serve.port) and not PARTIAL.exists()


@pytest.fixture(scope="module")
def plain_server(served):
    with ProfiledServer(baseline_plan(served)) as server:
        yield server


@pytest.mark.faults
def test_requests_that_wait_for_others_are_not_timed(plain_server, monkeypatch):
    monkeypatch.setattr("tasks.profile_server.decoding._SETTLE_TIMEOUT_S", 2)
    prompts = [answer.prompt_token_ids for answer in _answers()]
    with pytest.raises(DraftlineError, match=r"baseline server runs 2 of 3 requests at once.*serve.max_total_tokens"):
        step_ms(plain_server, prompts, 4)


@pytest.mark.faults
def test_requests_last_as_long_as_the_cache_holds_all_of_them(plain_server):
    prompts = [answer.prompt_token_ids for answer in _answers()]
    assert _tokens_that_last(plain_server, prompts, 2) == 640
    assert _tokens_that_last(plain_server, prompts, 30) == 8192 // 30 - 41
    with pytest.raises(DraftlineError, match=r"holds 8192 tokens, and 200 requests at once need more than 8200"):
        step_ms(plain_server, prompts, 200)


@pytest.mark.faults
def test_a_request_that_ends_before_the_measurement_is_an_error(plain_server, monkeypatch):
    prompts = [answer.prompt_token_ids for answer in _answers()]
    short = tuple(
        flag("--context-length", "64", reason="") if one.name == "--context-length" else one
        for one in plain_server.plan.flags
    )
    monkeypatch.setattr(plain_server, "plan", replace(plain_server.plan, flags=short))
    with pytest.raises(DraftlineError, match=r"baseline server ended after 23 tokens.*serve.context_length"):
        step_ms(plain_server, prompts, 2)
