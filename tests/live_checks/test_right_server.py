"""The doctor at a real SGLang server that is right in everything, and at its edges."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.draft_trace import DraftTrace
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.live_checks.dumped import dumped_prompts
from tasks.common.live_checks.interview import interview
from tasks.common.live_checks.rounds import OwnDraft, check_rounds
from tasks.common.served_draft import load_served_draft
from tasks.common.server import Server
from tasks.common.speculative_plan import EXPORT
from tasks.common.target_weights import TargetWeights
from tests.doctor.checkpoints import not_fine
from tests.live_checks.conftest import doctor, line_of

STEPS = 3


@pytest.fixture(scope="module")
def trace(tiny_run) -> DraftTrace:
    vocab_map = _own(tiny_run, EXPORT).vocab_map
    return DraftTrace(Path("logs/draft_trace.jsonl"), vocab_map.target_ids.tolist())


@pytest.fixture(scope="module")
def server(tiny_run, trace) -> Server:
    plan = tiny_run.plan
    traced = replace(plan, flags=(*plan.flags, *trace.flags), environment=(*plan.environment, *trace.environment))
    with Server(traced) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server, trace):
    prompts = dumped_prompts(HiddenStates(HIDDEN_STATES / "heldout"), 4)
    return interview(server, prompts, num_steps=STEPS, with_states=True, trace=trace)


def _own(tiny_run, folder: Path) -> OwnDraft:
    draft, target = Draft.of(DraftFiles.open(folder)), TargetWeights(tiny_run.plan.target)
    return OwnDraft(*load_served_draft(draft, target), STEPS)


@pytest.fixture
def other_weights(tiny_run, tmp_path) -> Path:
    """The export with another output projection: it loads, and proposes other tokens now and then."""
    folder = shutil.copytree(EXPORT, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    name = "midlayer.mlp.down_proj.weight"
    tensors[name] = tensors[name] + 0.3 * tensors[name].std() * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _verdict(server, answers, own):
    def ask_again(answer, tokens):
        return server.generate(answer.prompt.token_ids, {"temperature": 0, "max_new_tokens": tokens})

    return check_rounds(answers, own, exact=True, ask_again=ask_again, decode=str)


def test_nothing_is_found_wrong(server):
    checks = doctor(server, plan=line_of(server), hidden_states=HIDDEN_STATES)
    assert not_fine(checks) == {}
    assert "every histogram is the same" in checks["W3 served draft"].found
    assert float(checks["S4 acceptance"].found.split()[0]) > 2  # not the agreement of two drafts that accept nothing


def test_without_a_dump_the_target_is_replayed_and_a_draft_of_other_prompts_is_all_that_is_found(server):
    checks = doctor(server, plan=line_of(server))
    assert list(not_fine(checks)) == ["S4 acceptance"]
    assert "next to nothing is accepted, as predicted" in checks["S4 acceptance"].found
    assert "in transformers" in checks["C3 slot 0"].found


def test_the_servers_own_arguments_stand_in_for_a_plan(server):
    checks = doctor(server)
    assert checks["C1 algorithm"].verdict == checks["S3 chain"].verdict == "ok"
    assert "weight-version NONCE proves which server it is" in checks["S1 nonce"].found


def test_our_draft_proposes_what_the_server_proposes_round_by_round(tiny_run, answers):
    own = _own(tiny_run, EXPORT)
    for answer in answers:
        rounds = own.rounds_of(answer)
        assert [one.proposed for one in rounds] == [one.proposed for one in answer.rounds]
        for one in answer.rounds:
            assert [best[0] for best in one.candidates] == one.proposed
            assert {len(best) for best in one.candidates} == {5}


def test_other_weights_are_found_at_the_first_round_that_differs(tiny_run, server, answers, other_weights):
    own, right = _own(tiny_run, other_weights), _own(tiny_run, EXPORT)
    traced = _verdict(server, answers, own)
    assert traced.verdict == "error"
    assert "the server drafted" in traced.found

    over_http = _verdict(server, [replace(answer, rounds=None) for answer in answers], own)
    assert over_http.verdict == "error"
    differing = next(a for a in answers if _counts(own, a) != list(a.completion.correct_drafts_histogram))
    both = zip(own.rounds_of(differing), right.rounds_of(differing), strict=False)
    first = next(a for a, b in both if (a.generated, a.correct) != (b.generated, b.correct))
    assert f"{differing.prompt.id}, first differing round at token {first.generated}: we draft {first.proposed}" in (
        over_http.found
    )


def _counts(own: OwnDraft, answer) -> list[int]:
    counts = [one.correct for one in own.rounds_of(answer)]
    return [counts.count(length) for length in range(STEPS + 1)]


def test_another_nonce_and_another_draft_than_planned_are_another_server(server, other_weights):
    line = line_of(server).replace(server.weight_version, "yesterday")
    checks = doctor(server, draft=other_weights, plan=line, hidden_states=HIDDEN_STATES)
    assert "another server" in checks["S1 nonce"].found
    assert checks["S1 port"].verdict == "ok"
    assert checks["S4 draft path"].verdict == "warning"
    assert checks["W3 served draft"].verdict == "error"
