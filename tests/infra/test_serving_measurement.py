"""The script that measures serving on a GPU: its project, and that a part which is ended leaves nothing."""

import json
import sys
from pathlib import Path

import pytest

from infra.gpu import measure_serving
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.params import load_params
from tasks.common.responses import read_responses
from tasks.common.server_session import Process
from tasks.common.target import TARGET, target_contract
from tasks.prepare_target.prepare import prepare_target
from tests.random_draft import write_random_draft


@pytest.fixture
def arguments(tmp_path, tiny_model_folder, tiny_params, monkeypatch):
    """`arguments(name=value, ...)` are those of a call over the tiny target, a random draft and one question a folder."""
    monkeypatch.chdir(tmp_path)
    prepare_target(tiny_params().target, TARGET)
    write_random_draft(Path("draft"), target_contract(tiny_params(contract={"aux_layer_ids": [1, 3, 4]}).contract))
    for folder, text in (("sets", "the quick brown fox"), ("heldout", "Paris is the capital")):
        Path(folder).mkdir()
        Path(folder, "small.jsonl").write_text(json.dumps({"turns": [text]}) + "\n")

    def of(**changes):
        words = {
            "target": tiny_model_folder,
            "draft": "draft",
            "sets": "sets",
            "heldout": "heldout",
            "work": "work",
            "ttt-length": 5,
            "device": "cpu",
            "dtype": "float32",
            "extra-args": "",
        }
        line = [f"--{name}={value}" for name, value in (words | changes).items()]
        monkeypatch.setattr(sys, "argv", ["measure_serving", *line])
        return measure_serving._arguments()

    return of


def test_the_project_is_the_products_own_and_tunes_on_other_prompts_than_it_measures(arguments, monkeypatch, tmp_path):
    args = arguments()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    measure_serving._make_project(args)
    params = load_params()
    assert params.train_draft.ttt_length == 5
    assert params.serve.max_running_requests == 64
    assert list(params.benchmark.sets) == ["small"]
    assert [row.domain for row in read_responses("heldout")] == ["small"]
    measure_serving._make_project(args)  # goes on in it
    monkeypatch.chdir(tmp_path)
    other = arguments(dtype="bfloat16")
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(DraftlineError, match="other values of dtype"):
        measure_serving._make_project(other)


def test_layers_are_those_of_the_drafts_contract_whatever_its_config_counts(arguments, monkeypatch, tmp_path):
    config = read_json(Path("draft/config.json"))
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [
        2,
        4,
        5,
    ]  # as SGLang reads a draft of DeepSeek's shape
    write_json(Path("draft/config.json"), config)
    args = arguments()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    measure_serving._make_project(args)
    assert load_params().contract.aux_layer_ids == (1, 3, 4)


def test_a_part_ends_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("endless.py").write_text(
        "import os, pathlib, time\npathlib.Path('began').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert measure_serving._run(["endless"], 3) == "ended at its limit of 3 s"
    assert Process.of(int(Path("began").read_text())).start_ticks == 0  # nobody has this pid


def test_the_tuners_plan_replaces_the_settings_that_it_names(arguments, monkeypatch, tmp_path):
    args = arguments()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    measure_serving._make_project(args)
    measure_serving._change("serve", {"num_steps": 2, "num_draft_tokens": 3})
    assert (load_params().serve.num_steps, load_params().serve.max_running_requests) == (2, 64)
    with pytest.raises(DraftlineError, match="num_draft_tokens"):
        measure_serving._change("serve", {"num_steps": 4})
        load_params()
    assert read_json(measure_serving.PROJECT)["dtype"] == "float32"
