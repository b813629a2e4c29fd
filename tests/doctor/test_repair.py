"""A repaired copy passes; what would be a guess is left alone, and nothing is overwritten."""

import pytest
import torch
from safetensors.torch import load_file

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.doctor.examine import Request, examine, examine_copy
from tasks.doctor.repair import repair
from tests.doctor.checkpoints import (
    DRAFT_VOCAB,
    VOCAB,
    Checkpoint,
    not_fine,
    sglang_draft,
    specforge_draft,
    speculators_draft,
)


@pytest.fixture
def repaired(tmp_path, write_target):
    """`repaired(draft, kind)`: what was done, and the verdicts on the copy."""

    def run(draft, kind="llama", hidden=32):
        request = Request(draft.write(tmp_path / "draft"), write_target(kind, hidden))
        done = repair(examine(request)[0], tmp_path / "out")
        copy = examine_copy(request, tmp_path / "out") if done else []
        return done, {check.id: check for check in copy}

    return run


def absolute(draft):
    draft.tensors["d2t"] = draft.tensors["d2t"] + torch.arange(DRAFT_VOCAB)


def as_int32(draft):
    draft.tensors["d2t"] = draft.tensors["d2t"].int()


REPAIRABLE = {
    "absolute d2t": absolute,
    "t2d missing": lambda d: d.tensors.pop("t2d"),
    "int32 d2t": as_int32,
    "eagle_config missing": lambda d: d.config.pop("eagle_config"),
    "ids shifted": lambda d: d.config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 6, 9]),
    "last state alone": lambda d: d.config["eagle_config"].update(use_aux_hidden_state=False),
    "tied": lambda d: d.config.update(tie_word_embeddings=True),
    "another class": lambda d: d.config.update(architectures=["LlamaForCausalLM"]),
    "positions": lambda d: d.config.update(max_position_embeddings=2048),
    "no dtype": lambda d: d.config.pop("torch_dtype"),
    "theta in one spelling is another": lambda d: d.config.update(rope_theta=1e4),
    "RoPE in one spelling": lambda d: [d.config.pop(n) for n in ("rope_theta", "rope_scaling")],
    "RoPE dropped altogether": lambda d: [d.config.pop(n) for n in ("rope_theta", "rope_parameters", "rope_scaling")],
    "everything at once": lambda d: (
        absolute(d),
        d.config.update(tie_word_embeddings=True, max_position_embeddings=2048),
        [d.config.pop(n) for n in ("eagle_config", "rope_scaling", "rope_theta", "torch_dtype")],
    ),
}


def written(folder):
    return read_json(folder / "config.json"), load_file(folder / "model.safetensors")


def assert_same(found: dict, correct: dict) -> None:
    assert found.keys() == correct.keys()
    for name, tensor in correct.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("fault", REPAIRABLE)
def test_a_repaired_copy_is_the_correct_draft_bit_by_bit(repaired, tmp_path, fault):
    draft, correct = sglang_draft(), sglang_draft()
    REPAIRABLE[fault](draft)
    done, checks = repaired(draft)
    assert len(done) >= 1
    assert not_fine(checks) == {}
    config, tensors = written(tmp_path / "out")
    assert config == correct.config
    assert_same(tensors, correct.tensors)


@pytest.mark.parametrize("flag", ["fc_norm", "norm_output"])
def test_a_norm_flag_inside_eagle_config_is_lifted_to_where_sglang_reads_it(repaired, tmp_path, flag):
    draft, correct = specforge_draft(), specforge_draft()
    correct.config[flag] = True
    draft.config.pop(flag, None)
    draft.config["eagle_config"][flag] = True
    _, checks = repaired(draft)
    assert not_fine(checks) == {}
    config, tensors = written(tmp_path / "out")
    assert config == correct.config
    assert_same(tensors, correct.tensors)


def test_nulls_that_are_read_as_absent_are_dropped(repaired, tmp_path):
    draft, correct = sglang_draft(), sglang_draft()
    draft.config |= dict.fromkeys(("attention_bias", "target_hidden_size", "num_aux_hidden_states", "bias"))
    _, checks = repaired(draft)
    assert not_fine(checks) == {}
    assert written(tmp_path / "out")[0] == correct.config


def test_a_pickle_becomes_safetensors_under_sglangs_names(tmp_path, write_target):
    """Tied weights of a pickle share their bytes, which safetensors does not store."""
    draft = specforge_draft()
    draft.config["tie_word_embeddings"] = True
    folder = draft.write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    tied = draft.tensors["layers.0.hidden_norm.weight"]
    torch.save(draft.tensors | {"norm.weight": tied}, folder / "pytorch_model.bin")
    request = Request(folder, write_target())
    repair(examine(request)[0], tmp_path / "out")
    correct = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft.tensors.items()}
    assert_same(written(tmp_path / "out")[1], correct | {"norm.weight": tied})


def test_the_drafts_own_record_stands_in_the_copy(tmp_path):
    draft = sglang_draft()
    absolute(draft)
    folder = draft.write(tmp_path / "draft")
    record = read_json(folder / "draftline.json") | {"vocab_map_sha256": "a", "model_sha256": "b", "config_sha256": "c"}
    write_json(folder / "draftline.json", record)
    done = repair(examine(Request(folder))[0], tmp_path / "out")
    kept = {"contract": record["contract"], "vocab_map_sha256": "a", "repaired": done}
    assert read_json(tmp_path / "out" / "draftline.json") == kept


def test_layers_of_a_deepseek_target_are_written_as_it_reads_them(repaired, tmp_path):
    draft = sglang_draft("deepseek")
    draft.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 30, 58]
    _, checks = repaired(draft, "deepseek")
    assert not_fine(checks) == {}
    eagle = read_json(tmp_path / "out" / "config.json")["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]


@pytest.mark.parametrize("sizes", [{}, {"num_aux": 4}, {"target_hidden": 64}, {"draft_vocab": VOCAB}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek"])
def test_speculators_form_becomes_sglang_form_bit_by_bit(repaired, tmp_path, kind, sizes):
    draft, correct = speculators_draft(kind, **sizes), sglang_draft(kind, **sizes)
    del correct.config["hidden_act"]
    done, checks = repaired(draft, kind, sizes.get("target_hidden", 32))
    assert "speculators form -> SGLang form, norm flags kept" in done
    assert not_fine(checks) == {}
    assert checks["form"].found.startswith("SGLang/EAGLE")
    config, tensors = written(tmp_path / "out")
    assert {name: config[name] for name in correct.config} == correct.config
    embedding = {"embed_tokens.weight": draft.tensors["embed_tokens.weight"]} if "target_hidden" in sizes else {}
    assert_same(tensors, correct.tensors | embedding)


def test_the_theta_that_speculators_leaves_out_is_llamas_and_not_the_targets(repaired, tmp_path):
    """transformers writes only what differs from the default, 10000."""
    draft = speculators_draft("qwen3")
    del (
        draft.config["transformer_layer_config"]["rope_theta"],
        draft.config["transformer_layer_config"]["rope_parameters"],
    )
    repaired(draft, "qwen3")
    assert written(tmp_path / "out")[0]["rope_theta"] == 10000


def test_norm_flags_of_speculators_are_kept_at_the_top_level(repaired, tmp_path):
    draft = speculators_draft()
    draft.config["norm_before_fc"] = True
    draft.tensors["input_norm.weight"] = torch.ones(96)
    _, checks = repaired(draft)
    assert not_fine(checks) == {}
    assert read_json(tmp_path / "out" / "config.json")["norm_before_fc"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True},
        {"embed_requires_grad": True},
        {"transformer_layer_config": {"model_type": "qwen3"}},
    ],
)
def test_what_sglang_cannot_serve_is_not_converted(repaired, tmp_path, changes):
    draft = speculators_draft()
    for name, value in changes.items():
        draft.config[name] = draft.config[name] | value if isinstance(value, dict) else value
    with pytest.raises(DraftlineError, match="--fix"):
        repaired(draft)
    assert not (tmp_path / "out").exists()


def test_layer_ids_are_not_written_for_a_target_that_is_not_known(tmp_path):
    draft = speculators_draft()
    draft.config["speculators_config"]["verifier"] = {}
    subject, _ = examine(Request(draft.write(tmp_path / "draft")))
    with pytest.raises(DraftlineError, match="Give --target"):
        repair(subject, tmp_path / "out")


def without_rope_parameters() -> Checkpoint:
    """As transformers 4 writes it, and without what is the default."""
    draft = sglang_draft()
    del draft.config["rope_parameters"], draft.config["tie_word_embeddings"]
    del draft.config["eagle_config"]["use_aux_hidden_state"]
    return draft


@pytest.mark.parametrize("make", [sglang_draft, specforge_draft, without_rope_parameters])
def test_a_correct_draft_is_not_copied(repaired, tmp_path, make):
    assert repaired(make())[0] == []
    assert not (tmp_path / "out").exists()


NO_GUESS = {
    "fc missing": lambda d: d.tensors.pop("fc.weight"),
    "RoPE dropped, and nothing records the training": lambda d: (
        [d.config.pop(n) for n in ("rope_theta", "rope_parameters", "rope_scaling")],
        setattr(d, "record", False),
    ),
    "all zero d2t": lambda d: d.tensors.update(d2t=torch.zeros_like(d.tensors["d2t"])),
    "another theta in both spellings": lambda d: (
        d.config.update(rope_theta=1e4),
        d.config["rope_parameters"].update(rope_theta=1e4),
    ),
}


@pytest.mark.parametrize("fault", NO_GUESS)
def test_what_would_be_a_guess_stays_an_error(repaired, fault):
    draft = sglang_draft()
    NO_GUESS[fault](draft)
    assert repaired(draft)[0] == []


def test_a_folder_in_use_is_not_overwritten(tmp_path, write_target):
    draft = sglang_draft()
    absolute(draft)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    subject, _ = examine(Request(draft.write(tmp_path / "draft"), write_target()))
    with pytest.raises(DraftlineError, match="is not empty"):
        repair(subject, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
