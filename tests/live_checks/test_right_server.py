"""The doctor at a real SGLang server that is right in everything, and at its edges."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.draft_trace import DraftTrace
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.live_checks.dumped import dumped_prompts
from tasks.common.live_checks.interview import interview
from tasks.common.live_checks.rounds import OwnDraft, check_rounds
from tasks.common.live_checks.slots import Reference
from tasks.common.live_checks.unrecorded import check_unrecorded_layers
from tasks.common.parity import layer_outputs
from tasks.common.served_draft import load_served_draft
from tasks.common.server import Server
from tasks.common.speculative_plan import EXPORT
from tasks.common.target import load_model
from tasks.common.target_weights import TargetWeights
from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import not_fine
from tests.live_checks.conftest import doctor, line_of
from tests.tiny_run import AUX

STEPS = 3


@pytest.fixture(scope="module")
def trace(tiny_run) -> DraftTrace:
    vocab_map = _own(tiny_run, EXPORT).vocab_map
    return DraftTrace(Path("logs/draft_trace.jsonl"), vocab_map.target_ids.tolist())


@pytest.fixture(scope="module")
def server(tiny_run, trace) -> Server:
    plan = tiny_run.plan
    with Server(plan.adding(trace.flags, trace.environment)) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server, trace):
    prompts = dumped_prompts(HiddenStates(HIDDEN_STATES / "heldout"))
    return interview(server, prompts, num_steps=STEPS, with_states=True, trace=trace)


def _own(tiny_run, folder: Path) -> OwnDraft:
    draft, target = Draft.of(DraftFiles.open(folder)), TargetWeights(tiny_run.plan.target)
    return OwnDraft(*load_served_draft(draft, target), STEPS)


@pytest.fixture
def other_weights(tiny_run, tmp_path) -> Path:
    """The export without its MLP: it loads, and proposes other tokens."""
    folder = shutil.copytree(EXPORT, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.mlp.down_proj.weight"].zero_()
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
    assert checks["C3 slot 0 (the dump)"].verdict == checks["C3 slot 0 (transformers)"].verdict == "ok"
    assert float(checks["S4 acceptance"].found.split()[0]) > 2  # not the agreement of two drafts that accept nothing


def test_without_a_dump_the_target_is_replayed_and_a_draft_of_other_prompts_is_all_that_is_found(server):
    checks = doctor(server, plan=line_of(server))
    assert list(not_fine(checks)) == ["S4 acceptance"]
    assert "next to nothing is accepted, as predicted" in checks["S4 acceptance"].found
    assert checks["C3 slot 0 (transformers)"].verdict == "ok"


def test_the_servers_own_arguments_stand_in_for_a_plan(server):
    checks = doctor(server)
    assert checks["C1 algorithm"].verdict == checks["S3 chain"].verdict == "ok"
    assert "weight-version NONCE proves which server it is" in checks["S1 nonce"].found


def test_our_draft_proposes_what_the_server_proposes_round_by_round(tiny_run, answers):
    own = _own(tiny_run, EXPORT)
    for answer in answers:
        rounds = own.rounds(answer, answer.states)
        assert [one.proposed for one in rounds] == [one.proposed for one in answer.rounds]
        for one in answer.rounds:
            assert [best[0] for best in one.candidates] == one.proposed
            assert {len(best) for best in one.candidates} == {5}


def test_a_proposal_that_no_histogram_shows_is_found_in_the_trace(tiny_run, server, answers):
    own = _own(tiny_run, EXPORT)
    answer = next(a for a in answers if any(one.correct < STEPS - 1 for one in own.rounds(a, a.states)))
    place = next(n for n, one in enumerate(own.rounds(answer, answer.states)) if one.correct < STEPS - 1)
    rounds = list(answer.rounds)
    rounds[place] = replace(rounds[place], proposed=[*rounds[place].proposed[:-1], 0])  # behind the first wrong token
    check = _verdict(server, [replace(answer, rounds=rounds)], own)
    assert check.verdict == "error"
    assert f"the server drafted {rounds[place].proposed}" in check.found


def test_two_drafts_that_accept_nothing_prove_nothing(tiny_run, server, answers):
    own = _own(tiny_run, EXPORT)
    own.model.lm_head.weight.data.zero_()  # it proposes the same token for ever
    silent = [
        replace(answer, rounds=None, completion=replace(answer.completion, correct_drafts=0)) for answer in answers
    ]
    assert _verdict(server, silent, own).verdict == "not applicable"


def test_over_http_alone_the_server_is_told_by_width_speculation_and_nonce(server):
    _, checks = examine(Request(EXPORT, server=server.url, plan=line_of(server)))
    verdicts = {check.id: check.verdict for check in checks}
    for name in ("S1 nonce", "S1 server", "S1 port", "S4 speculation", "C1 width", "H1 rows"):
        assert verdicts[name] == "ok", name
    assert verdicts["C3 slots"] == verdicts["W3 served draft"] == "not applicable"


def test_other_weights_are_found_at_the_first_round_that_differs(tiny_run, server, answers, other_weights):
    own, right = _own(tiny_run, other_weights), _own(tiny_run, EXPORT)
    traced = _verdict(server, answers, own)
    assert traced.verdict == "error"
    assert "the server drafted" in traced.found

    over_http = _verdict(server, [replace(answer, rounds=None) for answer in answers], own)
    assert over_http.verdict == "error"
    differing = next(a for a in answers if _counts(own, a) != list(a.completion.correct_drafts_histogram))
    both = zip(own.rounds(differing, differing.states), right.rounds(differing, differing.states), strict=False)
    first = next(a for a, b in both if (a.generated, a.correct) != (b.generated, b.correct))
    assert f"{differing.prompt.id}, first differing round at token {first.generated}: we draft {first.proposed}" in (
        over_http.found
    )


def _counts(own: OwnDraft, answer) -> list[int]:
    counts = [one.correct for one in own.rounds(answer, answer.states)]
    return [counts.count(length) for length in range(STEPS + 1)]


def test_a_draft_of_a_larger_vocabulary_does_not_end_the_server(server, tmp_path):
    """SGLang looks up whatever id it is asked, and dies of one that is not there."""
    folder = shutil.copytree(EXPORT, tmp_path / "larger")
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 128256}))
    with pytest.raises(DraftlineError, match="of another target than the one that is served"):
        examine(Request(folder, server=server.url))
    assert server.is_healthy()


@pytest.mark.parametrize(("shift", "verdict"), [(0, "ok"), (1, "warning")])
def test_ids_that_nothing_records_are_told_by_what_the_draft_accepts(tiny_run, answers, shift, verdict):
    """The draft was trained on AUX; its ids name those, or the layers one later."""
    model, layers = load_model(tiny_run.params.target), tuple(layer + shift for layer in AUX)
    references = []
    for answer in answers:
        ids = torch.tensor(answer.token_ids)
        aux = {s: torch.stack(layer_outputs(model, ids, tuple(n + s for n in layers)), dim=1) for s in (-1, 0, 1)}
        shifted = {s: states for s, states in aux.items() if s}
        references.append(Reference("transformers", answer.prompt.id, ids, aux[0], {}, shifted=shifted))
    check = check_unrecorded_layers(_own(tiny_run, EXPORT), answers, references, layers)
    assert check.verdict == verdict
    assert f" on {list(AUX)}" in check.found
    if verdict == "warning":
        assert f"it seems to have been trained on {list(AUX)}, one layer earlier" in check.found


def test_where_little_is_accepted_no_layers_are_guessed(server, tmp_path):
    folder = shutil.copytree(EXPORT, tmp_path / "unrecorded")
    (folder / "draftline.json").unlink()
    checks = doctor(server, draft=folder)
    assert checks["C3 unrecorded layers"].verdict == "not applicable"
    assert "nothing records its training" in checks["C3 slot 0 (transformers)"].expected


def test_another_nonce_and_another_draft_than_planned_are_another_server(server, other_weights):
    line = line_of(server).replace(server.weight_version, "yesterday")
    checks = doctor(server, draft=other_weights, plan=line, hidden_states=HIDDEN_STATES)
    assert "another server" in checks["S1 nonce"].found
    assert checks["S1 server"].verdict == "ok"  # it serves what the plan says
    assert checks["S1 port"].verdict == "ok"
    assert checks["S4 draft path"].verdict == "warning"
    assert checks["W3 served draft"].verdict == "error"
