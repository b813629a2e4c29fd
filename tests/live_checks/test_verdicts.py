"""What the live checks conclude from a server's answers, on answers written by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.accepted import Prediction, check_acceptance, check_speculation
from tasks.common.live_checks.identity import Listener, check_nonce, check_port_owner, check_serves
from tasks.common.live_checks.interview import Answer, Prompt
from tasks.common.live_checks.layer_fix import layer_fix
from tasks.common.live_checks.rows import check_rows, check_width
from tasks.common.live_checks.run import _room
from tasks.common.live_checks.slots import Reference, check_slots, compare
from tasks.common.parity import Match, output_name
from tasks.common.server_session import command_line
from tasks.common.sglang_client import Completion
from tests.doctor.checkpoints import HIDDEN, contract_of, sglang_draft
from tests.ports import free_port_pair

STATES = {"enable_return_hidden_states": True, "speculative_algorithm": "EAGLE"}


def completion(rounds: int = 10, histogram: tuple[int, ...] = (2, 3, 5)) -> Completion:
    correct = sum(length * count for length, count in enumerate(histogram))
    return Completion([7, 8], "", "length", 3, 0, "nonce", rounds, correct, histogram, None, 0.0)


def answer(width: int = 3 * HIDDEN, rows: int = 5, cached: int = 0, **figures) -> Answer:
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return Answer(Prompt("prompt-1", [4, 5, 6]), completion(**figures), [], states, cached)


@pytest.fixture
def subject(tmp_path):
    """`subject(kind, ids)`: a draft under a contract, its config's ids replaced."""
    from tasks.common.draft_files import DraftFiles
    from tasks.common.draft_form import Draft

    def make(kind: str = "llama", ids: list[int] | None = None, **changes) -> Subject:
        checkpoint = sglang_draft(kind)
        if ids:
            checkpoint.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        contract = contract_of(kind)
        files = DraftFiles.open(checkpoint.write(tmp_path / "draft"))
        return Subject(Draft.of(files, contract.architecture), contract=contract, contract_from="test", **changes)

    return make


@pytest.mark.parametrize(
    ("algorithm", "found", "fix"),
    [
        ("EAGLE", "rows of 32, one state: EAGLE in place of EAGLE3, fc is never called", "it runs EAGLE"),
        (None, "rows of 32, one state: it runs without a draft", "--speculative-algorithm EAGLE3"),
        ("EAGLE3", "rows of 32, one state: it captures another number of layers", "eagle_config that the server loads"),
    ],
)
def test_rows_one_state_wide_are_explained_by_what_the_server_runs(subject, algorithm, found, fix):
    info = STATES | {"speculative_algorithm": algorithm}
    check = check_width([answer(width=HIDDEN)], subject(), [], info)
    assert (check.verdict, check.found) == ("error", found)
    assert fix in check.fix


def test_rows_of_another_number_of_layers_are_named(subject):
    served = answer(width=2 * HIDDEN)
    states = {output_name(3): served.states[:, :HIDDEN], output_name(9): served.states[:, HIDDEN:]}
    reference = Reference("transformers", "prompt-1", torch.tensor(served.token_ids), torch.zeros(5, 3, HIDDEN), states)
    check = check_width([served], subject(), [reference], STATES)
    assert check.verdict == "error"
    assert "slot 0: the output of layer 3 (" in check.found and "slot 1: the output of layer 9 (" in check.found


def test_a_server_that_returns_no_states_is_told_which_flag_to_add(subject):
    check = check_width([answer()], subject(), [], {})
    assert (check.verdict, "--enable-return-hidden-states" in check.found) == ("not applicable", True)
    check = check_width([answer()], subject(), [], STATES | {"return_hidden_states_mode": "last"})
    assert (check.verdict, "--return-hidden-states-mode full" in check.found) == ("not applicable", True)


def test_tokens_without_a_row_are_the_prefix_caches():
    check = check_rows([answer(rows=3, cached=2)], STATES)
    assert check.verdict == "error"
    assert "3 rows for 5 tokens, 2 of them from the prefix cache" in check.found
    assert "--disable-radix-cache" in check.fix
    assert check_rows([answer()], STATES).verdict == "ok"


def test_rows_that_are_missing_without_a_cache_are_those_of_the_first_chunks():
    check = check_rows([answer(rows=3)], STATES | {"chunked_prefill_size": 3})
    assert check.verdict == "error"
    assert "cut into chunks" in check.found and "--chunked-prefill-size -1" in check.fix


def test_rows_that_are_not_finite_are_no_layer():
    broken = answer()
    broken.states[3, 7] = torch.nan
    check = check_rows([broken], STATES)
    assert check.verdict == "error"
    assert "1 of 5 rows hold NaN or Inf, token 3 first" in check.found


def test_the_interview_fits_into_context_and_chunk():
    """A prompt, 48 tokens of an answer, the tokens beyond it, and of the context what SGLang keeps for a round."""
    assert _room({"context_length": 128, "speculative_num_draft_tokens": 6}, 5) == 128 - 48 - 5 - 2 - 6
    assert _room({"context_length": 4096, "chunked_prefill_size": 64}, 3) == 64 - 48 - 3 - 2
    assert _room({"chunked_prefill_size": -1}, 3) > 4096
    with pytest.raises(DraftlineError, match=r"context_length 50 .* too small to ask anything"):
        _room({"context_length": 50}, 3)


@pytest.mark.parametrize(
    ("predicted", "verdict"),
    [(2.3, "ok"), (2.5, "ok"), (2.10, "ok"), (2.61, "warning"), (2.04, "warning"), (3.2, "error"), (1.7, "error")],
)
def test_served_acceptance_is_held_against_the_predicted_one(predicted, verdict):
    """Served is 1 + 13/10 = 2.30: a warning beyond 10 %, an error beyond 25 % of the prediction."""
    whole, part = divmod(round(100 * (predicted - 1)), 100)
    rounds = [whole + 1] * part + [whole] * (100 - part)
    check = check_acceptance([answer()], Prediction("the dump", [answer()], rounds), "")
    assert f"predicted from the states of the dump: {predicted:.2f}" in check.found
    assert check.found.startswith("2.30 (13 drafts right in 10 rounds)")
    assert check.verdict == verdict


@pytest.mark.parametrize(("histogram", "verdict"), [((10,), "warning"), ((2, 3, 5), "not applicable")])
def test_without_a_prediction_only_next_to_nothing_is_worth_a_warning(histogram, verdict):
    check = check_acceptance([answer(histogram=histogram)], None, "no target")
    assert check.verdict == verdict
    assert "nothing predicts it: no target" in check.found


def test_a_server_that_never_speculated_is_no_acceptance_length_of_one():
    silent = [answer(rounds=0, histogram=())]
    assert check_speculation(silent).verdict == "error"
    assert check_acceptance(silent, None, "").verdict == "error"


HERE, ELSEWHERE = Listener(os.getpid(), True, ("python", "-m", "sglang.launch_server")), Listener(None, False)


def test_another_server_is_told_by_its_nonce():
    check = check_nonce("yesterday", "today", HERE)
    assert check.verdict == "error"
    assert f"kill {os.getpid()}" in check.fix
    assert check_nonce("today", "today", HERE).verdict == "ok"
    assert check_nonce("default", None, HERE).verdict == "not applicable"


def test_what_the_server_resolved_is_held_against_the_plan(tmp_path):
    info = {"model_path": str(tmp_path), "speculative_algorithm": "EAGLE3"}
    planned = {"model_path": f"{tmp_path}/../{tmp_path.name}", "speculative_algorithm": "eagle3"}
    assert check_serves(info, planned, HERE).verdict == "ok"
    check = check_serves(
        info | {"speculative_algorithm": "EAGLE"}, planned | {"speculative_draft_model_path": "d"}, HERE
    )
    assert check.verdict == "error"
    assert check.found == (
        "speculative_algorithm is EAGLE, planned eagle3; speculative_draft_model_path is None, planned d"
    )


def test_without_a_plan_nothing_is_to_be_stopped(tmp_path):
    info = {"speculative_draft_model_path": str(tmp_path)}
    check = check_serves(info, {"speculative_draft_model_path": "/elsewhere"}, HERE, planned=False)
    assert check.verdict == "error"
    assert "kill" not in check.fix and "examined /elsewhere" in check.found


def test_a_relative_path_is_the_servers_not_ours(tmp_path, monkeypatch):
    (tmp_path / "draft").mkdir()
    there = Path.cwd()
    monkeypatch.chdir(tmp_path)
    assert HERE.same_place("draft", str(tmp_path / "draft")) is True
    assert HERE.same_place("draft", str(there / "draft")) is False
    assert Listener(os.getpid(), True, ("ssh", "-L")).same_place("draft", str(there / "draft")) is None


@pytest.mark.parametrize("listener", [ELSEWHERE, Listener(None, True)])
def test_paths_of_another_host_or_a_hubs_name_are_no_other_server(listener, tmp_path):
    check = check_serves({"model_path": "meta-llama/Llama-3.1-8B"}, {"model_path": str(tmp_path)}, listener)
    assert check.verdict == "not applicable"
    assert "meta-llama/Llama-3.1-8B: whether that is what was planned cannot be seen" in check.found


def test_the_owner_of_another_hosts_port_cannot_be_seen():
    assert Listener.of("http://gpu-7:30000") == ELSEWHERE
    assert Listener.of(f"http://127.0.0.1:{free_port_pair()}") == Listener(None, True)
    assert "another host" in check_port_owner(ELSEWHERE, "nonce").found
    assert "cannot be seen" in check_port_owner(Listener(None, True), "nonce").found


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["sglang.launch_server", "--weight-version", "today"], "ok"),
        (["sglang.launch_server", "--weight-version=yesterday"], "error"),
        (["sglang.launch_server"], "error"),
        (["docker-proxy", "--weight-version", "today"], "not applicable"),
    ],
)
def test_the_process_that_listens_is_held_against_what_answers(words, verdict):
    script = "import time; print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        listener = Listener(process.pid, True, tuple(command_line(process.pid)))
        assert check_port_owner(listener, "today").verdict == verdict
    finally:
        process.kill()
        process.wait()


def slots(*outputs: int) -> list[Match]:
    return [Match(output_name(layer), 0.0, output_name(layer + 1), 0.3) for layer in outputs]


def test_ids_that_are_read_as_boundaries_are_written_one_higher(subject):
    """The first user's case: outputs 2, 30, 58 wanted; the old config says so and captures 1, 29, 57."""
    examined = subject("deepseek", [2, 30, 58])
    fix = layer_fix(examined, (2, 30, 58), serves_examined=True)(slots(1, 29, 57))
    assert fix == "Set eagle_config.eagle_aux_hidden_state_layer_ids to [3, 31, 59] and restart the server."


def test_an_engine_that_reads_ids_unlike_the_table_is_told_by_what_it_captures(subject):
    examined = subject("llama", [1, 5, 8])
    fix = layer_fix(examined, (1, 5, 8), serves_examined=True)(slots(2, 6, 9))
    assert fix.startswith("This server reads id k as the output of layer k+1")
    assert "[0, 4, 7]" in fix


def test_what_is_no_layers_output_keeps_the_ids_that_are_known(subject):
    examined = subject("deepseek", [0, 31, 59])
    embedding = Match("the embedding", 0.0, output_name(0), 0.3)
    fix = layer_fix(examined, (2, 30, 58), serves_examined=True)([embedding, *slots(30, 58)])
    assert "[3, 31, 59]" in fix


def test_default_layers_are_called_so(subject):
    examined = replace(subject("llama", [2, 6, 9]), contract=contract_of("llama", (2, 6, 9)))
    fix = layer_fix(examined, (2, 6, 9), serves_examined=True)(slots(1, 5, 8))
    assert "SGLang's default layers" in fix and "[2, 6, 9]" in fix


def test_of_a_server_that_loaded_another_folder_no_ids_are_guessed(subject):
    examined = subject("llama", [1, 5, 8])
    fix = layer_fix(examined, (1, 5, 8), serves_examined=False)(slots(2, 6, 9))
    assert fix == f"Serve {examined.draft.files.folder}: the server loaded another folder."


def test_a_slot_that_is_near_but_nearer_to_another_layer_fails(subject):
    """Where neighbours are alike, a limit alone would pass them; where they are not, the right layer is a warning."""
    served = answer()
    slot = served.states[:, :HIDDEN]
    aux = served.states.unflatten(1, (3, HIDDEN)) * 1.005
    states = {output_name(1): aux[:, 0], output_name(2): slot, output_name(5): aux[:, 1], output_name(8): aux[:, 2]}
    reference = Reference("transformers", "prompt-1", torch.tensor(served.token_ids), aux, states)
    parity = compare(served, reference, (1, 5, 8))
    fix = layer_fix(subject(), (1, 5, 8), serves_examined=True)

    def verdicts(limit: float, gated: bool) -> list[str]:
        return [check.verdict for check in check_slots(parity, limit, gated, "test", fix)]

    assert verdicts(0.05, gated=False) == ["error", "ok", "ok"]
    assert verdicts(0.001, gated=True) == ["error", "error", "error"]
    assert verdicts(0.001, gated=False) == ["error", "warning", "warning"]


def test_a_dump_alone_names_only_what_it_surely_holds(subject):
    served = answer()
    aux = served.states.unflatten(1, (3, HIDDEN)).roll(1, dims=1)
    known = {output_name(layer): aux[:, slot] for slot, layer in enumerate((1, 5, 8))}
    reference = Reference("the dump", "prompt-1", torch.tensor(served.token_ids), aux, known, complete=False)
    assert [row.match.name for row in compare(served, reference, (1, 5, 8))] == [output_name(n) for n in (5, 8, 1)]
    elsewhere = replace(reference, states={name: torch.randn(5, HIDDEN) for name in known})
    assert [row.match for row in compare(served, elsewhere, (1, 5, 8))] == [None, None, None]
