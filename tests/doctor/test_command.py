"""The command: exit codes, JSON for machines, a table for people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.doctor.__main__ import main
from tests.doctor.checkpoints import sglang_draft

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doctor(tmp_path, write_target, capsys):
    """`doctor(draft, "--json")`: exit code, stdout, stderr."""

    def run(draft, *arguments):
        folder = draft.write(tmp_path / "draft")
        code = main(["--draft", str(folder), "--target", str(write_target()), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def broken():
    draft = sglang_draft()
    draft.config["tie_word_embeddings"] = True
    return draft


def test_a_correct_draft_exits_0(doctor):
    code, out, err = doctor(sglang_draft())
    assert (code, err) == (0, "")
    assert "errors: 0" in out and "warnings: 0" in out


def test_an_error_exits_1_and_says_what_to_do(doctor, broken):
    code, out, _ = doctor(broken)
    assert code == 1
    assert "error: W2 tied head" in out
    assert "Set tie_word_embeddings: false" in out


def test_what_cannot_be_read_exits_2(doctor, tmp_path, capsys):
    assert main(["--draft", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_a_whole_model_in_the_place_of_a_draft_is_told_so(doctor, tmp_path, capsys):
    draft = sglang_draft()
    draft.tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(4) for n in range(3)}
    draft.config["num_hidden_layers"] = 3
    code, _, err = doctor(draft)
    assert code == 2
    assert "a whole model of 3 layers without fc, no EAGLE-3 draft" in err


def test_whoever_reads_half_of_it_sees_no_traceback(doctor, tmp_path):
    folder = sglang_draft().write(tmp_path / "draft")
    command = f"{sys.executable} -m tasks.doctor --draft {folder} --json | head -c 10"
    ran = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.stdout == '{\n  "verdi'
    assert "Traceback" not in ran.stderr


def test_a_terminal_of_another_encoding_is_no_verdict(tmp_path):
    folder = sglang_draft().write(tmp_path / "é")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "tasks.doctor", "--draft", str(folder), *flags]
        assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120).returncode == 0


def test_a_draft_with_another_layer_than_llamas_is_not_judged(doctor):
    draft = sglang_draft()
    draft.config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    code, _, err = doctor(draft)
    assert code == 2
    assert "Llama's layer only" in err


def test_json_holds_every_check_whole(doctor, broken):
    code, out, _ = doctor(broken, "--json")
    report = json.loads(out)
    assert (code, report["verdict"], report["form"]) == (1, "error", "SGLang/EAGLE")
    check = next(check for check in report["checks"] if check["id"] == "W2 tied head")
    assert check.keys() == {"id", "verdict", "found", "expected", "why", "fix"}
    assert check["verdict"] == "error"


def test_json_of_what_could_not_run_is_json_too(tmp_path, capsys):
    assert main(["--draft", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "could not run"


def test_fix_writes_a_copy_and_judges_the_copy(doctor, broken, tmp_path):
    code, out, _ = doctor(broken, "--fix", str(tmp_path / "out"), "--json")
    report = json.loads(out)
    assert (code, report["verdict"]) == (0, "ok")
    assert report["repaired"]["changes"] == ["tie_word_embeddings: True -> False"]
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_verdict_that_does_not_apply_gives_its_reason(doctor):
    _, out, _ = doctor(sglang_draft(draft_vocab=None), "--json")
    check = next(check for check in json.loads(out)["checks"] if check["id"] == "V1 vocabulary map")
    assert check["verdict"] == "not applicable"
    assert "the draft proposes all 96 tokens" in check["found"]
