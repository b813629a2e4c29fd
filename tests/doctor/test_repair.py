"""A repaired copy passes; what would be a guess is left alone, and nothing is overwritten."""

import pytest
import torch
from safetensors.torch import load_file

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.doctor.examine import Request, examine, examine_copy
from tasks.doctor.repair import repair
from tests.doctor.checkpoints import DRAFT_VOCAB, VOCAB, not_fine, sglang_draft, speculators_draft


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


REPAIRABLE = {
    "absolute d2t": absolute,
    "t2d missing": lambda d: d.tensors.pop("t2d"),
    "eagle_config missing": lambda d: d.config.pop("eagle_config"),
    "ids shifted": lambda d: d.config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 6, 9]),
    "tied": lambda d: d.config.update(tie_word_embeddings=True),
    "another class": lambda d: d.config.update(architectures=["LlamaForCausalLM"]),
    "positions": lambda d: d.config.update(max_position_embeddings=2048),
    "theta in one spelling is another": lambda d: d.config.update(rope_theta=1e4),
    "RoPE dropped altogether": lambda d: [d.config.pop(n) for n in ("rope_theta", "rope_parameters", "rope_scaling")],
    "null": lambda d: d.config.update(head_dim=None),
}


@pytest.mark.parametrize("fault", REPAIRABLE)
def test_a_repaired_copy_passes_and_is_the_correct_draft(repaired, tmp_path, fault):
    draft, correct = sglang_draft(), sglang_draft()
    REPAIRABLE[fault](draft)
    done, checks = repaired(draft)
    assert len(done) >= 1
    assert not_fine(checks) == {}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == correct.tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in correct.tensors.items())
    config = read_json(tmp_path / "out" / "config.json")
    assert {name: config.get(name, correct.config[name]) for name in correct.config} == correct.config


def test_layers_of_a_deepseek_target_are_written_as_it_reads_them(repaired, tmp_path):
    draft = sglang_draft("deepseek")
    draft.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 30, 58]
    _, checks = repaired(draft, "deepseek")
    assert not_fine(checks) == {}
    eagle = read_json(tmp_path / "out" / "config.json")["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]


@pytest.mark.parametrize("sizes", [{}, {"target_hidden": 64}, {"draft_vocab": VOCAB}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek"])
def test_speculators_form_becomes_sglang_form(repaired, tmp_path, kind, sizes):
    draft, correct = speculators_draft(kind, **sizes), sglang_draft(kind, **sizes)
    done, checks = repaired(draft, kind, sizes.get("target_hidden", 32))
    assert "speculators form -> SGLang form, norm flags kept" in done
    assert not_fine(checks) == {}
    assert checks["form"].found.startswith("SGLang/EAGLE")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == correct.tensors.keys()
    config = read_json(tmp_path / "out" / "config.json")
    for name in ("eagle_config", "hidden_size", "draft_vocab_size", "rope_theta", "target_hidden_size"):
        assert config.get(name) == correct.config.get(name)


def test_norm_flags_of_speculators_are_kept_at_the_top_level(repaired, tmp_path):
    draft = speculators_draft()
    draft.config["norm_before_fc"] = True
    draft.tensors["input_norm.weight"] = torch.ones(96)
    _, checks = repaired(draft)
    assert not_fine(checks) == {}
    assert read_json(tmp_path / "out" / "config.json")["norm_before_fc"] is True


@pytest.mark.parametrize("changes", [{"norm_before_residual": True}, {"embed_requires_grad": True}])
def test_what_sglang_cannot_serve_is_not_converted(repaired, tmp_path, changes):
    draft = speculators_draft()
    draft.config |= changes
    with pytest.raises(DraftlineError, match="--fix"):
        repaired(draft)
    assert not (tmp_path / "out").exists()


def test_layer_ids_are_not_written_for_a_target_that_is_not_known(tmp_path):
    draft = speculators_draft()
    draft.config["speculators_config"]["verifier"] = {}
    subject, _ = examine(Request(draft.write(tmp_path / "draft")))
    with pytest.raises(DraftlineError, match="Give --target"):
        repair(subject, tmp_path / "out")


def test_a_correct_draft_is_not_copied(repaired, tmp_path):
    assert repaired(sglang_draft())[0] == []
    assert not (tmp_path / "out").exists()


NO_GUESS = {
    "fc missing": lambda d: d.tensors.pop("fc.weight"),
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
