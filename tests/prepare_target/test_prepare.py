import json
import shutil

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.params import Target
from tasks.common.target import TARGET, load_model, load_tokenizer, model_folder, render_prompt, stop_token_ids
from tasks.prepare_target.prepare import prepare_target


@pytest.fixture
def own_model(tmp_path, tiny_model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(tiny_model_folder, tmp_path / "mine")


def test_builtin_target_knows_the_capital_of_france(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_target(Target(), TARGET)
    tokenizer, model = load_tokenizer(), load_model(Target())
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    rendered = tokenizer.decode(prompt)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>assistant\n")
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in stop_token_ids() and tokenizer.convert_ids_to_tokens(answer[-1]) == "<|im_end|>"
    config = read_json(TARGET / "config.json")
    assert (config["architectures"], config["rms_norm_eps"]) == (["LlamaForCausalLM"], 1e-5)


def test_weights_of_a_local_target_stay_where_they_are(own_model):
    prepare_target(Target(model=str(own_model)), TARGET)
    assert not list(TARGET.glob("*.safetensors"))
    assert model_folder(Target(model=str(own_model))) == own_model
    assert load_tokenizer().chat_template


def test_identity_is_of_the_content_not_of_the_place(own_model, tmp_path):
    first = prepare_target(Target(model=str(own_model)), tmp_path / "a")
    moved = shutil.move(own_model, tmp_path / "elsewhere")
    assert prepare_target(Target(model=str(moved)), tmp_path / "b") == first
    assert (tmp_path / "a" / "draftline.json").read_bytes() == (tmp_path / "b" / "draftline.json").read_bytes()


def test_one_changed_weight_changes_the_identity(own_model, tmp_path):
    first = prepare_target(Target(model=str(own_model)), tmp_path / "a")
    weights = own_model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert prepare_target(Target(model=str(own_model)), tmp_path / "b")["target_sha256"] != first["target_sha256"]


def test_weights_swapped_after_preparation_are_refused(own_model):
    prepare_target(Target(model=str(own_model)), TARGET)
    weights = own_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(DraftlineError, match="not those that prepare_target hashed"):
        model_folder(Target(model=str(own_model)))


def test_target_without_chat_template_is_refused(own_model):
    (own_model / "chat_template.jinja").unlink()
    with pytest.raises(DraftlineError, match="no chat template"):
        prepare_target(Target(model=str(own_model)), TARGET)


def test_target_without_stop_token_is_refused(own_model):
    (own_model / "generation_config.json").write_text(json.dumps({}))
    with pytest.raises(DraftlineError, match="no eos_token_id"):
        prepare_target(Target(model=str(own_model)), TARGET)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no folder './nowhere'"),
        ("name-without-organisation", "not a hub id"),
        (".", "has no config.json"),
        ("nobody/no-such-model", "cannot be fetched"),
    ],
)
def test_target_that_cannot_be_had_is_refused(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DraftlineError, match=words):
        prepare_target(Target(model=model), TARGET)
