"""One real SGLang server over a tiny random target and a tiny random EAGLE-3 draft, float32, on the CPU."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.common.files import read_json
from tasks.common.params import Regenerate
from tasks.common.parity import Agreement, layer_outputs
from tasks.common.server import Server
from tasks.common.server_plan import ServerPlan
from tasks.common.server_session import Process, port_is_free
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import stop_token_ids, target_contract
from tasks.regenerate_responses.engines import Request, _cut_at_stop, _generate_on_server
from tests.ports import free_port_pair
from tests.random_draft import HIDDEN, VOCAB, write_random_draft

ROOT = Path(__file__).parents[2]
AUX = (1, 3, 4)


@pytest.fixture(scope="module")
def plan(tmp_path_factory, tiny_model_folder) -> ServerPlan:
    """The plan of the speculative server, in a folder of its own that is the current directory.

    The target that it serves has a generation config which would change every answer, were it heeded.
    """
    from tasks.common.params import Params
    from tasks.common.target import TARGET
    from tasks.prepare_target.prepare import prepare_target

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("served"))
        target = shutil.copytree(tiny_model_folder, Path("target").resolve())
        generation = read_json(target / "generation_config.json") | {"repetition_penalty": 1.5, "top_k": 2}
        (target / "generation_config.json").write_text(json.dumps(generation))
        params = Params.model_validate(
            {
                "target": {"model": str(target)},
                "contract": {"aux_layer_ids": AUX},
                "serve": {
                    "port": free_port_pair(),
                    "context_length": 256,
                    "max_total_tokens": 2048,
                    "max_running_requests": 2,
                },
            }
        )
        prepare_target(params.target, TARGET)
        write_random_draft(Path("artifacts/export"), target_contract(params.contract))
        yield speculative_plan(params).with_hidden_states()


@pytest.fixture(scope="module")
def orphan(plan) -> Process:
    """A server whose stage was killed with SIGKILL while it started: it runs on, and its record names it."""
    stage = """
import pickle, sys, time
from tasks.common.server import Server
server = Server(pickle.loads(bytes.fromhex(sys.argv[1])))
server.launch()
print(server._process.pid, flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", stage, pickle.dumps(plan).hex()], stdout=subprocess.PIPE, env=environment, text=True
    )
    left = Process.of(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.is_alive
    return left


@pytest.fixture(scope="module")
def server(plan, orphan) -> Server:
    with Server(plan) as server:
        yield server


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def completion(server, token_ids):
    return server.generate(
        token_ids, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}, return_hidden_states=True
    )


def test_the_next_start_reaps_a_server_whose_stage_was_killed(server, orphan):
    assert not orphan.is_alive


def test_every_answer_names_the_server_that_gave_it(server, completion):
    assert completion.weight_version == server.weight_version


def test_drafts_are_verified(completion):
    assert len(completion.output_ids) == 12
    assert completion.verify_rounds > 0
    assert sum(completion.correct_drafts_histogram) == completion.verify_rounds


def test_the_draft_is_fed_the_outputs_of_the_contracts_layers(completion, token_ids, tiny_model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    served = torch.from_numpy(completion.hidden_states[: len(token_ids)])
    assert served.shape == (40, len(AUX) * HIDDEN)
    slots = served.view(40, len(AUX), HIDDEN).unbind(1)
    ids = torch.tensor(token_ids)
    for slot, right, late in zip(
        slots, layer_outputs(model, ids, AUX), layer_outputs(model, ids, tuple(i + 1 for i in AUX)), strict=True
    ):
        assert Agreement.of(slot, right).relative_error < 1e-3
        assert Agreement.of(late, slot).relative_error > 0.05  # ids + 1: the wrong reading, nowhere near


def test_greedy_text_is_that_of_the_target_alone(completion, token_ids, tiny_model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    plain = model.generate(torch.tensor([token_ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert completion.output_ids == plain[0, 40:].tolist()


def test_answers_regenerated_on_the_server_are_the_targets_own_whatever_ends_them(server, tiny_model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    prompts = torch.randint(3, VOCAB, (256, 9), generator=torch.Generator().manual_seed(2))
    plain = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=False)
    own = [
        _cut_at_stop(Request("train", f"train-{n}", prompt.tolist()), row.tolist(), stop_token_ids())
        for n, (prompt, row) in enumerate(zip(prompts, plain[:, 9:], strict=True))
    ]
    stopped = next(answer for answer in own if answer.finish_reason == "stop" and len(answer.output_token_ids) > 1)
    expected = [stopped, *[answer for answer in own if answer.finish_reason == "length"][:2]]
    settings = Regenerate(engine="sglang", max_new_tokens=16, batch_size=2)
    groups = list(_generate_on_server(server, settings, [answer.request for answer in expected]))
    served = {answer.request.id: answer for group in groups for answer in group}
    assert served == {answer.request.id: answer for answer in expected}


def test_nothing_is_left_after_the_stop(server):
    """Last: it stops the server of this module."""
    leader = Process.of(server._process.pid)
    server.stop()
    assert not leader.is_alive
    assert port_is_free(server.plan.port)
    assert not list(Path("logs").glob("server-*.json"))
