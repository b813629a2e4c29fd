"""Sets of questions and other drafts, found wrong before anything is spent: in the benchmark's own words."""

import json
from pathlib import Path

import pytest

from tasks.benchmark.arms import arms_of
from tasks.benchmark.questions import loads_of
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.target import target_contract
from tasks.verify_environment.checks.asked import check_drafts, check_sets
from tasks.verify_environment.facts import Asked
from tasks.verify_environment.probes.asked import find
from tests.random_draft import write_random_draft

AUX = {"aux_layer_ids": [1, 3, 4]}
QUESTION = json.dumps({"prompt": "What is the capital of France?"})
TOO_LONG = json.dumps({"prompt": "the quick brown fox " * 100})


@pytest.fixture
def asking(tiny_params, tmp_path, monkeypatch):
    """`asking(sets, drafts)`: parameters in a folder where no stage has run yet."""
    monkeypatch.chdir(tmp_path)

    def make(sets=None, drafts=None, **sections) -> Params:
        asked = {"sets": sets or {}, "drafts": drafts or {}}
        return tiny_params(**{"serve": {"context_length": 256}, "contract": AUX, "benchmark": asked} | sections)

    return make


def look(params: Params) -> Asked:
    return Asked.model_validate(find(params.model_dump(mode="json")))


def prepare(params: Params) -> None:
    """What the stages before the benchmark leave."""
    from tasks.common.target import TARGET
    from tasks.prepare_target.prepare import prepare_target

    prepare_target(params.target, TARGET)
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))


@pytest.fixture
def theirs(project, tiny_params):
    """`theirs(**changes)` writes a draft of the tiny target without a record, its config changed."""

    def write(**changes) -> Path:
        folder = project / "theirs"
        write_random_draft(folder, target_contract(tiny_params(contract=AUX).contract), **changes)
        (folder / "draftline.json").unlink()
        return folder

    return write


def test_questions_are_rendered_before_the_target_is_prepared(asking):
    Path("set.jsonl").write_text(f"{QUESTION}\n{json.dumps({'turns': ['And of Spain?']})}\n")
    asked = look(asking({"mine": "set.jsonl"}))
    assert asked.sets["mine"].problem is None
    assert asked.sets["mine"].found.startswith("2 questions of up to ")
    assert check_sets(asked).verdict == "ok" and "mine: 2 questions" in check_sets(asked).found


@pytest.mark.parametrize(
    "lines", [None, "", '{"question": "x"}', '{"prompt": 7}', '{"prompt": "<|im_end|>"}', TOO_LONG, "[1]", "{"]
)
def test_a_set_is_refused_in_the_words_of_the_benchmark(asking, lines):
    if lines is not None:
        Path("set.jsonl").write_text(f"{QUESTION}\n{lines}\n" if lines else "")
    params = asking({"mine": "set.jsonl"})
    asked = look(params)
    prepare(params)
    with pytest.raises(DraftlineError) as refusal:
        loads_of(params)
    assert asked.sets["mine"].problem == str(refusal.value)
    check = check_sets(asked)
    assert check.verdict == "error" and str(refusal.value) in check.found


def test_every_set_and_draft_is_told_at_once(asking):
    asked = look(asking({"one": "a.jsonl", "two": "b.jsonl"}, {"three": "./c"}))
    assert all(name in check_sets(asked).found for name in ("benchmark.sets.one", "benchmark.sets.two"))
    assert check_drafts(asked).verdict == "error" and "benchmark.drafts.three" in check_drafts(asked).found


def test_questions_are_read_even_where_the_target_cannot_be(asking):
    Path("set.jsonl").write_text(QUESTION)
    Path("broken.jsonl").write_text("{")
    asked = look(asking({"mine": "set.jsonl", "broken": "broken.jsonl"}, target={"model": "./nowhere"}))
    assert asked.sets["mine"].found == "1 questions, not rendered"
    assert "broken.jsonl:1: not valid JSON" in asked.sets["broken"].problem


def test_a_draft_that_fits_is_ok(asking, theirs):
    asked = look(asking(drafts={"other": str(theirs())}))
    assert asked.drafts["other"].problem is None and check_drafts(asked).verdict == "ok"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 128},
        {"max_position_embeddings": 128},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
        {"torch_dtype": None, "draft_vocab_size": 64},
    ],
)
def test_a_draft_is_refused_in_the_words_of_the_benchmark(asking, theirs, changes):
    params = asking(drafts={"other": str(theirs(**changes))})
    asked = look(params)
    prepare(params)
    with pytest.raises(DraftlineError) as refusal:
        arms_of(params)
    assert asked.drafts["other"].problem == str(refusal.value)


def test_a_record_of_another_target_is_found_before_any_hash_of_this_one_is_known(asking, theirs, tiny_params):
    folder, params = theirs(), asking(drafts={"other": "theirs"})
    record = target_contract(params.contract).model_dump() | {"num_layers": 30, "target_sha256": "unknown yet"}
    (folder / "draftline.json").write_text(json.dumps({"contract": record}))
    problem = look(params).drafts["other"].problem
    assert "H7 record: num_layers: 30 in" in problem and "target_sha256" not in problem


def test_of_a_draft_on_the_hub_the_config_is_enough(asking, theirs, monkeypatch, tmp_path):
    """A hub's cache as a fetch of the config alone leaves it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    cached, commit = tmp_path / "cache" / "models--somebody--draft", "1" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    params = asking(drafts={"other": "somebody/draft"})
    assert "config.json: not there. Expected: the hub id of an EAGLE-3 draft" in look(params).drafts["other"].problem
    (theirs() / "config.json").rename(snapshot / "config.json")
    assert look(params).drafts["other"].found == "somebody/draft on the hub, its config alone"


def test_this_runs_own_export_is_not_there_yet_and_no_error(asking):
    assert check_drafts(look(asking(drafts={"again": "artifacts/export"}))).verdict == "ok"


def test_without_sets_and_drafts_there_is_nothing_to_check():
    assert check_sets(Asked()).verdict == check_drafts(Asked()).verdict == "not applicable"


def test_a_probe_that_crashed_is_an_error():
    assert check_sets(Asked(error="killed by signal 9")).verdict == "error"
