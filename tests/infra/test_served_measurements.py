"""What is measured of served drafts, up to the servers: answers, both forms of their states, a trained draft, the table."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from infra.gpu.places import ROOT
from infra.gpu.served_acceptance import read_sets, table
from infra.gpu.served_answers import link_target, make_answers, make_features, write_features
from infra.gpu.served_training import EXPORTS, TRAINED, predicted, train_draftline, train_with_specforge
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json, write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.speculative_plan import speculative_plan


@pytest.fixture
def params(project, tiny_params):
    prompts = [{"prompt": f"what is {number} times the brown fox?"} for number in range(14)]
    write_jsonl(project / "prompts" / "train.jsonl", prompts[:10])
    write_jsonl(project / "prompts" / "heldout.jsonl", prompts[10:])
    return tiny_params(
        prompts={"folder": str(project / "prompts")},
        regenerate={"max_new_tokens": 24},
        dump={"storage_dtype": "bfloat16"},
        train_draft={"draft_vocab_size": 310, "ttt_length": 5},
        serve={"context_length": 256},
    )


@pytest.fixture
def answers(params):
    return make_answers(params)


def test_features_are_the_states_and_no_file_holds_its_whole_shard(answers, params, project):
    make_features(params, project / "features")
    states = HiddenStates(HIDDEN_STATES / "train")
    files = sorted((project / "features").glob("rows_0-10/data_*.ckpt"))
    assert len(files) == len(states) == 10
    for number in range(10):
        path, sample = project / f"features/rows_0-10/data_{number}.ckpt", states.read(number)
        stored, tokens = torch.load(path), sample.num_tokens
        assert stored["hidden_state"].equal(sample.last[None].bfloat16())
        assert stored["aux_hidden_state"].equal(sample.aux.reshape(1, tokens, 3 * 64).bfloat16())
        assert stored["input_ids"].tolist() == sample.input_ids.tolist()
        assert stored["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert path.stat().st_size < tokens * (4 * 64 * 2 + 16) + 4000


def test_features_that_do_not_fit_are_refused_before_one_is_written(answers, project, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DraftlineError, match="--folder"):
        write_features(HiddenStates(HIDDEN_STATES / "train"), project / "elsewhere" / "features")
    assert not list((project / "elsewhere").iterdir())


def test_too_few_answer_tokens_are_said(answers, capsys):
    assert answers["answers"]["train"]["output_tokens"] > 0
    assert answers["reached_3m"] is False


def test_a_target_for_specforge_names_the_file_of_each_tensor(tiny_model_folder, tmp_path):
    link_target(tiny_model_folder, tmp_path / "linked")
    index = json.loads((tmp_path / "linked/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(tmp_path / "linked/model.safetensors").keys()
    assert not (tiny_model_folder / "model.safetensors.index.json").exists()


def test_the_exported_draft_is_served_as_trained_and_predicts_as_its_trainer_did(answers, params):
    found = train_draftline(params, "ours", epochs=2, per_step=4, rate=1e-3, evaluations=2)
    assert found["steps"] == 2 * -(-10 // 4)
    assert found["sequences_per_step"] == pytest.approx(10 / 3, abs=0.01)
    assert [point["step"] for point in found["curve"]] == [3, 6]
    best = max(
        (point["heldout"]["predicted_accept_lengths"] for point in found["curve"]), key=lambda lengths: lengths[-1]
    )
    assert predicted(params, "ours") == {"3/1/4": round(best[2], 3), "5/1/6": round(best[4], 3)}
    assert speculative_plan(params, EXPORTS / "ours").algorithm == "EAGLE3"


def test_a_trainer_of_no_step_that_ends_well_has_trained_nothing(answers, params, project, monkeypatch):
    (project / "specforge").mkdir()
    (project / "specforge/cli.py").write_text("print('nothing to do')\n")
    monkeypatch.setenv("PYTHONPATH", f"{project}{os.pathsep}{ROOT}")
    with pytest.raises(DraftlineError, match=r"SpecForge's training failed: .*'failed': 0"):
        train_with_specforge(params, "theirs", 1, 4, 1e-4, "sdpa", project / "features")


def test_sets_are_named_by_their_files_and_cut_alike(project):
    for name in ("gsm8k", "mt_bench"):
        write_jsonl(project / "sets" / f"{name}.jsonl", [{"prompt": f"{name} {number}"} for number in range(3)])
    sets = read_sets(project / "sets", 2)
    assert {name: len(prompts) for name, prompts in sets.items()} == {"gsm8k": 2, "mt_bench": 2}
    assert sets["gsm8k"][0] != sets["mt_bench"][0]


def test_the_table_has_what_is_known_and_a_dash_for_what_failed(project):
    TRAINED.mkdir()
    write_json(TRAINED / "ours.json", {"seconds": 7, "tokens_per_s": 900, "predicted": {"3/1/4": 2.1, "5/1/6": 2.4}})
    served = {"gsm8k": {"accept_length": 2.5}}
    found = {"ours": {"3/1/4": served, "5/1/6": served}, "theirs": {"3/1/4": {"failed": "died"}}}
    head, _, ours, theirs = table(found).splitlines()
    assert head.startswith("| draft | gsm8k 3/1/4 | gsm8k 5/1/6 | predicted 3/1/4 |")
    assert ours.startswith("| ours | 2.5 | 2.5 | 2.1 | 2.4 | 7 | 900 |")
    assert theirs.startswith("| theirs | - | - |")
