"""One planted fault a check: the doctor names it by its id, and says what to do."""

from pathlib import Path

import pytest
import torch

from tasks.common.draft_checks.lost_keys import check_lost_keys, lost_keys
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tests.doctor.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    LLAMA3,
    VOCAB,
    not_fine,
    sglang_draft,
    specforge_draft,
    speculators_draft,
)


def config(**changes):
    return lambda draft: draft.config.update(changes)


def without(*names: str):
    def change(draft):
        for name in names:
            draft.config.pop(name, None)
            draft.tensors.pop(name, None)

    return change


def eagle(**changes):
    return lambda draft: draft.config["eagle_config"].update(changes)


def tensor(name: str, change):
    def apply(draft):
        draft.tensors[name] = change(draft.tensors[name]).contiguous()

    return apply


def rename(old: str, new: str):
    return lambda draft: draft.tensors.update({new: draft.tensors.pop(old)})


def both(*changes):
    def apply(draft):
        for change in changes:
            change(draft)

    return apply


def nan(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    weight.view(-1)[3] = torch.nan
    return weight


ABSOLUTE = tensor("d2t", lambda d2t: d2t + torch.arange(DRAFT_VOCAB))
# name: (check, planted fault, what is found)
FAULTS = {
    "another class": ("form", config(architectures=["LlamaForCausalLM"]), "expected ['LlamaForCausalLMEagle3']"),
    "another layer": ("form", config(model_type="qwen3"), "model_type is 'qwen3'"),
    "eagle_config removed": ("C2 eagle_config", without("eagle_config"), "silently capture default layers"),
    "ids as text": ("C2 eagle_config", eagle(eagle_aux_hidden_state_layer_ids="1,5,8"), "silently capture default"),
    "last state alone": ("C2 eagle_config", eagle(use_aux_hidden_state=False), "fed the last state alone"),
    "ids shifted by one": (
        "C3 layers",
        eagle(eagle_aux_hidden_state_layer_ids=[2, 6, 9]),
        "it was trained on [1, 5, 8]",
    ),
    "duplicate ids": ("C4 layer list", eagle(eagle_aux_hidden_state_layer_ids=[1, 5, 5]), "not distinct and ascending"),
    "beyond the target": ("C4 layer list", eagle(eagle_aux_hidden_state_layer_ids=[1, 5, 11]), "must lie in 0..10"),
    "num_aux disagrees": ("C4 layer list", config(num_aux_hidden_states=2), "but 3 ids are named"),
    "fc of other width": ("C4 layer list", tensor("fc.weight", lambda w: w[:, : 2 * HIDDEN]), "fc reads 64 values"),
    "embedding as a slot": (
        "H8 no embedding",
        eagle(eagle_aux_hidden_state_layer_ids=[-1, 5, 8]),
        "name the embedding",
    ),
    "flag without tensor": ("C6 norms", config(fc_norm=True), "fc_norm is on, but its tensor is not there"),
    "flag where it is ignored": ("C6 norms", eagle(fc_norm=True), "inside eagle_config, where SGLang ignores it"),
    "trained without": ("C6 norms", config(norm_output=True), "the draft was trained without it"),
    "stray bias": ("C6 norms", config(bias=True), "a bias that no tensor holds"),
    "mixed types": ("C10 dtype", tensor("fc.weight", torch.Tensor.half), "tensor fc.weight is F16"),
    "no dtype": ("C10 dtype", without("torch_dtype"), "torch_dtype is None"),
    "two draft layers": ("C11 draft layers", config(num_hidden_layers=2), "num_hidden_layers is 2"),
    "one aux layer": (
        "C12 fc runs",
        both(eagle(eagle_aux_hidden_state_layer_ids=[5]), tensor("fc.weight", lambda w: w[:, :HIDDEN])),
        "skips fc silently",
    ),
    "d2t missing": ("V1 vocabulary map", without("d2t"), "tensor d2t is missing"),
    "absolute ids": ("V2 V3 offsets", ABSOLUTE, "d2t holds absolute target ids"),
    "ids out of order": (
        "V2 V3 offsets",
        tensor("d2t", lambda d2t: torch.cat([d2t[:1] + 6, d2t[1:]])),
        "must ascend strictly",
    ),
    "all zero": ("V2 V3 offsets", tensor("d2t", torch.zeros_like), "d2t is all zero"),
    "t2d of another map": ("V2 V3 offsets", tensor("t2d", torch.logical_not), "they must be the same tokens"),
    "head missing": ("W1 head", without("lm_head.weight"), "lm_head.weight is missing"),
    "head where it is borrowed": ("W1 head", config(draft_vocab_size=None), "but lm_head.weight is there"),
    "tied": ("W2 tied head", config(tie_word_embeddings=True), "overwrite the draft's head"),
    "fc missing": ("W3 tensors", without("fc.weight"), "tensor fc.weight is missing"),
    "norm renamed": ("W3 tensors", rename("norm.weight", "final.weight"), "final.weight is unknown"),
    "q_norm": ("W3 tensors", lambda d: d.tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), "q_norm"),
    "twice under two names": (
        "W3 tensors",
        lambda d: d.tensors.update({"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}),
        "under two names",
    ),
    "q not 2H wide": ("W4 shapes", tensor("midlayer.self_attn.q_proj.weight", lambda w: w[:, :HIDDEN]), "q_proj"),
    "int32 map": ("W4 shapes", tensor("d2t", torch.Tensor.int), "expected I64"),
    "too few positions": ("W5 positions", config(max_position_embeddings=2048), "is 2048, served is the target's 4096"),
    "theta of another model": (
        "W6 RoPE",
        both(config(rope_theta=1e4), lambda d: d.config["rope_parameters"].update(rope_theta=1e4)),
        "the target {",
    ),
    "theta in one spelling": ("W6 RoPE", config(rope_theta=1e4), "transformers 4 reads one, 5 the other"),
    "scaling dropped": ("W6 RoPE", without("rope_parameters", "rope_scaling"), "the draft has {'rope_type': 'default'"),
    "null": ("W7 types", config(attention_bias=None), "attention_bias is None, expected bool"),
    "null width": ("W7 types", config(target_hidden_size=None), "target_hidden_size is None, expected int"),
    "theta as text": (
        "W7 types",
        lambda d: d.config["rope_parameters"].update(rope_theta="1e4"),
        "expected int or float",
    ),
    "no draft_vocab_size": ("W7 types", without("draft_vocab_size"), "AttributeError"),
    "flag as a number": ("W7 types", config(fc_norm=1), "fc_norm is 1, expected bool"),
    "vocabulary of another target": ("W8 target", config(vocab_size=VOCAB + 1), "vocab_size is 97, the target has 96"),
    "NaN": ("W10 finite", tensor("midlayer.mlp.up_proj.weight", nan), "up_proj.weight holds NaN"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(examined, fault):
    name, plant, found = FAULTS[fault]
    draft = sglang_draft()
    assert not_fine(examined(draft)) == {}
    plant(draft)
    check = examined(draft)[name]
    assert check.verdict == "error"
    assert found in check.found
    assert check.fix


def test_a_null_that_is_read_as_absent_is_a_warning(examined):
    draft = sglang_draft()
    draft.config |= {"head_dim": None, "fc_norm": None, "rope_scaling": LLAMA3}
    check = examined(draft)["W7 types"]
    assert (check.verdict, check.found) == ("warning", "head_dim, fc_norm: null, which is read as absent.")


def test_a_map_without_t2d_is_a_warning_and_d2t_is_checked_all_the_same(examined):
    draft = sglang_draft()
    del draft.tensors["t2d"]
    assert list(not_fine(examined(draft))) == ["V1 vocabulary map"]
    assert examined(draft)["V1 vocabulary map"].verdict == "warning"
    last = int(draft.tensors["d2t"][-1])
    draft.tensors["d2t"][-1] = VOCAB
    assert "must ascend strictly" in examined(draft)["V2 V3 offsets"].found
    draft.tensors["d2t"][-1] = last
    draft.config["vocab_size"] = 80  # ids up to 70 as they are, up to 93 as offsets
    ABSOLUTE(draft)
    assert "d2t holds absolute target ids" in examined(draft)["V2 V3 offsets"].found


def test_another_rope_than_the_targets_may_be_right_where_nothing_records_the_training(examined):
    draft = sglang_draft()
    draft.record = False
    draft.config |= {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    del draft.config["rope_scaling"]
    assert examined(draft)["W6 RoPE"].verdict == "warning"


def test_outputs_2_30_58_written_as_they_are_is_the_first_users_fault(examined):
    draft = sglang_draft("deepseek")
    draft.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 30, 58]
    check = examined(draft, "deepseek")["C3 layers"]
    assert check.verdict == "error"
    assert "capture the outputs of layers [1, 29, 57]; it was trained on [2, 30, 58]" in check.found
    assert "[3, 31, 59]" in check.fix


def test_a_missing_eagle_config_is_given_back_from_the_record(examined):
    draft = sglang_draft("deepseek")
    del draft.config["eagle_config"]
    assert '"eagle_aux_hidden_state_layer_ids": [3, 31, 59]' in examined(draft, "deepseek")["C2 eagle_config"].fix


def test_a_tensor_that_no_flag_turns_on_would_be_skipped(examined):
    draft = specforge_draft()
    del draft.config["fc_norm"]
    assert "fc_norm is off, but its tensor is there" in examined(draft)["C6 norms"].found


def test_a_norm_that_this_release_does_not_know_is_an_error(examined):
    draft = sglang_draft()
    draft.record = False
    draft.config["norm_before_fc"] = True
    draft.tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)
    assert not_fine(examined(draft)) == {}
    assert "SGLang 0.5.16 does not know it" in examined(draft, version="0.5.16")["C6 norms"].found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"norm_before_residual": True}, "SGLang's residual is never normed"),
        ({"embed_requires_grad": True}, "SGLang replaces the embedding that was trained"),
    ],
)
def test_what_speculators_trains_and_sglang_lacks_is_an_error(examined, changes, found):
    draft = speculators_draft()
    draft.config |= changes
    assert found in examined(draft)["C6 norms"].found


@pytest.mark.parametrize(
    ("architecture", "version", "verdict", "found", "fix"),
    [
        ("Qwen3MoeForCausalLM", "0.5.16", "ok", "on SGLang 0.5.16", None),
        (
            "MixtralForCausalLM",
            "0.5.23",
            "error",
            "has no capture hook for it and stops at its start",
            "another target",
        ),
        ("Gemma3ForCausalLM", "0.5.20", "error", "MLP branch without the residual", "Serve it with SGLang 0.5.16."),
        ("Qwen3_5ForCausalLM", "0.5.21", "error", "has no capture hook for it", "Serve it with SGLang 0.5.22."),
        ("LlamaForCausalLM", "0.5.24", "ok", "read as 0.5.23", None),
        ("MixtralForCausalLM", "0.5.24", "warning", "0.5.24 is newer than the table", "--server URL"),
    ],
)
def test_what_a_release_captures_of_a_target(write_target, tmp_path, architecture, version, verdict, found, fix):
    from tasks.doctor.examine import Request, examine

    folder = sglang_draft().write(tmp_path / "draft")
    _, checks = examine(Request(folder, write_target(architectures=[architecture]), version=version))
    check = {check.id: check for check in checks}["C8 capture"]
    assert check.verdict == verdict
    assert found in check.found
    assert fix is None or fix in check.fix


def test_ids_are_read_as_the_release_reads_them(write_target, tmp_path):
    """[5, 8, 12] of 12 layers on gpt-oss: boundaries from 0.5.17 on; before, layer 12 is none of them."""
    from tasks.doctor.examine import Request, examine

    draft = sglang_draft()
    draft.record = False
    draft.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [5, 8, 12]
    folder, target = draft.write(tmp_path / "draft"), write_target(architectures=["GptOssForCausalLM"])
    for version, verdict, layers in (("0.5.16", "error", [5, 8, 12]), ("0.5.17", "ok", [4, 7, 11])):
        checks = {check.id: check for check in examine(Request(folder, target, version=version))[1]}
        assert checks["C4 layer list"].verdict == verdict
        assert f"capture the outputs of layers {layers}" in checks["C3 layers"].found


def test_further_draft_layers_are_served_and_not_replayed(examined):
    draft = sglang_draft()
    draft.config["num_hidden_layers"] = 2
    for name, values in list(draft.tensors.items()):
        if name.startswith("midlayer.") and "input_layernorm" not in name:
            wide = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            draft.tensors[name.replace("midlayer", "layers.1")] = values[:, :HIDDEN].clone() if wide else values.clone()
    assert set(not_fine(examined(draft))) == {"C11 draft layers"}
    assert examined(draft)["C11 draft layers"].verdict == "warning"
    del draft.tensors["layers.1.hidden_norm.weight"]
    assert (
        "lack 1 tensors of further layers, as layers.1.hidden_norm.weight" in examined(draft)["C11 draft layers"].found
    )


def test_a_draft_of_another_target_is_named_by_its_record(examined, tmp_path):
    draft = sglang_draft()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "draftline.json").write_text('{"target_sha256": "3", "tokenizer_sha256": "2"}')
    assert "target_sha256" in examined(draft)["H7 record"].found


def subject_of(folder: Path) -> Subject:
    return Subject(Draft.of(DraftFiles.open(folder)))


def test_keys_that_transformers_keeps_pass(tmp_path):
    assert check_lost_keys(subject_of(sglang_draft().write(tmp_path / "draft"))).verdict == "ok"


def test_a_config_that_transformers_cannot_load_is_an_error(tmp_path):
    draft = sglang_draft()
    draft.config["model_type"] = "eagle"
    assert "cannot load the config" in check_lost_keys(subject_of(draft.write(tmp_path / "draft"))).found


def test_without_transformers_the_check_is_not_applicable_and_says_so(tmp_path):
    check = check_lost_keys(subject_of(sglang_draft().write(tmp_path / "draft")), load=False)
    assert (check.verdict, "--server" in check.found) == ("not applicable", True)


def test_code_that_a_draft_brings_is_never_run(tmp_path):
    """Not even where the folder holds a record of Draftline's that trusts it."""
    draft = sglang_draft()
    draft.config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    folder = draft.write(tmp_path / "draft")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    (folder / "draftline.json").write_text('{"trust_remote_code": true}')
    assert check_lost_keys(subject_of(folder)).verdict == "error"
    assert not (tmp_path / "was_run").exists()


def test_a_key_that_the_config_class_changes_is_named(tmp_path):
    folder = sglang_draft().write(tmp_path / "draft")
    wrong = {"vocab_size": VOCAB, "head_dim": 16}
    assert lost_keys(folder, wrong) == [
        f"{folder / 'config.json'}: head_dim is 16 in the file and 8 once transformers has loaded it."
    ]


def test_every_check_has_a_planted_fault(examined):
    elsewhere = {"C7 lost keys", "C8 capture", "H7 record", "W9 target weights"}  # planted by tests of their own
    assert set(examined(sglang_draft())) == {name for name, *_ in FAULTS.values()} | elsewhere
