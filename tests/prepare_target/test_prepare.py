import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.params import Target
from tasks.common.target import (
    TARGET,
    load_config,
    load_model,
    load_tokenizer,
    model_folder,
    render_prompt,
    stop_token_ids,
    weight_outline,
)
from tasks.common.target_source import locate
from tasks.prepare_target.prepare import prepare_target


class CountingHash:
    """A hash that notes how many bytes each `update` brings."""

    def __init__(self, of, read: list[int]):
        self.of, self.read, self.hexdigest = of, read, of.hexdigest

    def update(self, data: bytes) -> None:
        self.read.append(len(data))
        self.of.update(data)


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


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_weights_of_the_same_shapes_saved_over_the_old_ones_are_refused(own_model, place):
    prepare_target(Target(model=str(own_model)), TARGET)
    weights = own_model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    middle = (header + len(data)) // 2
    changed = {"first": slice(header, header + 1), "middle": slice(middle, middle + 2**17), "last": slice(-1, None)}
    data[changed[place]] = bytes(byte ^ 1 for byte in data[changed[place]])
    weights.write_bytes(data)
    with pytest.raises(DraftlineError, match="not those that prepare_target hashed"):
        model_folder(Target(model=str(own_model)))


def test_an_outline_reads_half_a_megabyte_of_a_large_file(own_model, monkeypatch):
    weights = own_model / "model.safetensors"
    os.truncate(weights, 2**35)  # a file with a hole: hashing it would take minutes
    read = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data=b"": CountingHash(sha256(data), read))
    weight_outline(own_model)
    assert sum(read) == 2**19


def test_a_config_changed_after_preparation_is_refused(own_model):
    prepare_target(Target(model=str(own_model)), TARGET)
    config = read_json(own_model / "config.json")
    write_json(own_model / "config.json", config | {"rms_norm_eps": 1e-3})
    with pytest.raises(DraftlineError, match="not those that prepare_target hashed"):
        model_folder(Target(model=str(own_model)))


@pytest.mark.parametrize("name", ["spiece.model", "qwen.tiktoken"])
def test_a_vocabulary_is_copied_and_hashed_whatever_its_name(own_model, name):
    hashes = []
    for content in (b"one", b"two"):
        (own_model / name).write_bytes(content)
        hashes.append(prepare_target(Target(model=str(own_model)), TARGET)["tokenizer_sha256"])
        assert (TARGET / name).read_bytes() == content
    assert hashes[0] != hashes[1]


def test_a_vocabulary_is_fetched_whatever_its_name(own_model, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda model, **options: asked.update(options) or str(own_model)
    )
    locate(Target(model="some/model"))
    assert {"*.model", "*.tiktoken"} <= set(asked["allow_patterns"])


def test_a_hub_that_answers_with_a_page_for_people_is_a_sentence(monkeypatch):
    def answer(*_, **__):
        json.loads("<html>log in</html>")

    monkeypatch.setattr("huggingface_hub.snapshot_download", answer)
    with pytest.raises(DraftlineError, match=r"some/model is no folder here, and cannot be fetched as a hub id"):
        locate(Target(model="some/model"))


def test_trust_in_the_targets_own_code_holds_for_later_stages(own_model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name, parent in (("Config", "LlamaConfig"), ("Tokenizer", "PreTrainedTokenizerFast")):
        code = f"from transformers import {parent}\n\n\nclass Own{name}({parent}):\n    model_type = 'own'\n"
        (own_model / f"own_{name.lower()}.py").write_text(code)
    config, tokenizer = read_json(own_model / "config.json"), read_json(own_model / "tokenizer_config.json")
    write_json(
        own_model / "config.json",
        config | {"model_type": "own", "auto_map": {"AutoConfig": "own_config.OwnConfig"}},
    )
    write_json(
        own_model / "tokenizer_config.json",
        tokenizer
        | {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}},
    )
    prepare_target(Target(model=str(own_model), trust_remote_code=True), TARGET)
    assert type(load_config()).__name__ == "OwnConfig"
    assert type(load_tokenizer()).__name__ == "OwnTokenizer"


def test_nothing_of_an_earlier_target_stays(own_model):
    prepare_target(Target(model=str(own_model)), TARGET)
    (own_model / "chat_template.jinja").unlink()
    config = read_json(own_model / "tokenizer_config.json")
    write_json(own_model / "tokenizer_config.json", config | {"chat_template": "of the second"})
    prepare_target(Target(model=str(own_model)), TARGET)
    assert load_tokenizer().chat_template == "of the second"


@pytest.mark.parametrize("model", ["artifacts/target", "artifacts/target/mine"])
def test_a_model_in_the_folder_that_is_emptied_is_refused_and_kept(own_model, model):
    shutil.copytree(own_model, model)
    with pytest.raises(DraftlineError, match="Move the model elsewhere"):
        prepare_target(Target(model=model), TARGET)
    assert (Path(model) / "model.safetensors").exists()


def test_what_a_link_in_the_place_of_the_target_points_to_is_kept(own_model, tmp_path):
    others = shutil.copytree(own_model, tmp_path / "others")
    TARGET.parent.mkdir()
    TARGET.symlink_to(others)
    prepare_target(Target(model=str(own_model)), TARGET)
    assert not (others / "draftline.json").exists()
    assert (others / "model.safetensors").exists()


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
