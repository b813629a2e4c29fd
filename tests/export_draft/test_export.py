"""The exported folder: exactly what SGLang loads, and every silent way to miss it found."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.checkpoint_form import check_export
from tasks.common.draft import Eagle3Draft
from tasks.common.draft_tensors import expected_tensors
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, write_json
from tasks.common.params import ContractParams
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.vocab_map import VocabMap
from tasks.export_draft.export import export_config, export_draft

DRAFT, EXPORT = ARTIFACTS / "draft", ARTIFACTS / "export"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def write_trained_draft(draft_vocab: int, shape: TargetShape, contract) -> dict[str, torch.Tensor]:
    """What train_draft leaves, with random weights; returns them."""
    torch.manual_seed(0)
    draft = Eagle3Draft.for_target(shape, contract, draft_vocab, torch.zeros(shape.vocab_size, shape.hidden_size))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter)
    DRAFT.mkdir(parents=True)
    save_file(draft.state_dict(), DRAFT / "draft.safetensors")
    vocab_map = VocabMap(torch.randperm(shape.vocab_size)[:draft_vocab].sort().values, shape.vocab_size, "test")
    vocab_map.save(DRAFT / "vocab_map.safetensors")
    record = {"contract": contract.model_dump(), "config": draft.config.to_dict(), "vocab_map_sha256": "test"}
    write_json(DRAFT / "draft.json", record)
    return draft.state_dict() | {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}


@pytest.fixture
def trained(project):
    return write_trained_draft(100, TargetShape.of(load_config()), target_contract(ContractParams()))


@pytest.fixture
def exported(trained):
    export_draft(DRAFT, EXPORT, "float32")
    return trained


def change_tensors(change) -> None:
    tensors = load_file(EXPORT / "model.safetensors")
    change(tensors)
    save_file(tensors, EXPORT / "model.safetensors")


def change_config(**fields) -> None:
    write_json(EXPORT / "config.json", read_json(EXPORT / "config.json") | fields)


def test_the_export_holds_exactly_the_trained_tensors_and_the_map(exported):
    written = load_file(EXPORT / "model.safetensors")
    assert written.keys() == exported.keys() == expected_tensors(read_json(EXPORT / "config.json")).keys()
    assert all(torch.equal(written[name], exported[name]) for name in exported)
    assert check_export(EXPORT) == []


def test_no_embedding_is_exported_since_the_server_shares_the_targets(exported):
    assert not [name for name in load_file(EXPORT / "model.safetensors") if "embed" in name]


def test_a_whole_vocabulary_needs_no_map(project):
    write_trained_draft(320, TargetShape.of(load_config()), target_contract(ContractParams()))
    export_draft(DRAFT, EXPORT, "float32")
    assert {"d2t", "t2d"}.isdisjoint(load_file(EXPORT / "model.safetensors"))


def test_weights_take_the_type_of_the_served_target(trained):
    export_draft(DRAFT, EXPORT, "bfloat16")
    assert load_file(EXPORT / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert read_json(EXPORT / "config.json")["torch_dtype"] == "bfloat16"


def test_the_record_carries_contract_and_hashes(exported):
    record = read_json(EXPORT / "draftline.json")
    assert record["contract"] == read_json(DRAFT / "draft.json")["contract"]
    assert {"vocab_map_sha256", "draft_sha256", "model_sha256", "config_sha256"} <= record.keys()


def test_two_exports_give_the_same_bytes(exported):
    first = {path.name: path.read_bytes() for path in EXPORT.iterdir()}
    shutil.rmtree(EXPORT)
    export_draft(DRAFT, EXPORT, "float32")
    assert {path.name: path.read_bytes() for path in EXPORT.iterdir()} == first


def test_rope_stands_in_both_spellings_with_llama3_scaling(trained):
    sizes = read_json(DRAFT / "draft.json")["config"] | {"rope_parameters": LLAMA3}
    config = export_config(sizes, target_contract(ContractParams()), "float32")
    assert config["rope_parameters"] == LLAMA3
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}


def test_layer_ids_are_written_as_this_architecture_reads_them(trained):
    sizes = read_json(DRAFT / "draft.json")["config"]
    contract = target_contract(ContractParams()).model_copy(
        update={"architecture": "DeepseekV3ForCausalLM", "num_layers": 61, "aux_layer_ids": (2, 30, 58)}
    )
    eagle = export_config(sizes, contract, "float32")["eagle_config"]
    assert eagle == {"eagle_aux_hidden_state_layer_ids": [3, 31, 59], "use_aux_hidden_state": True}


def test_nan_is_refused(trained):
    tensors = load_file(DRAFT / "draft.safetensors")
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, DRAFT / "draft.safetensors")
    with pytest.raises(DraftlineError, match=r"tensor norm.weight holds NaN or Inf"):
        export_draft(DRAFT, EXPORT, "float32")


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


TENSOR_FAULTS = {
    "renamed": (rename("fc.weight", "fc1.weight"), "tensor fc.weight is missing"),
    "unknown": (lambda t: t.update(extra=torch.zeros(2)), "tensor extra is unknown"),
    "head missing": (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
    "map missing": (lambda t: t.pop("d2t"), "tensor d2t is missing"),
    "shape": (
        lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}),
        r"q_proj.weight is F32 \[64, 64\], expected F32 \[64, 128\]",
    ),
    "type": (lambda t: t.update({"fc.weight": t["fc.weight"].half()}), "fc.weight is F16"),
    "absolute ids": (lambda t: t.update(d2t=t["d2t"] + torch.arange(100)), "d2t holds absolute target ids"),
    "all zero": (lambda t: t.update(d2t=torch.zeros_like(t["d2t"])), "d2t is all zero"),
    "t2d disagrees": (lambda t: t.update(t2d=~t["t2d"]), "they must be the same tokens"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_in_the_tensors_is_found(exported, fault):
    change, message = TENSOR_FAULTS[fault]
    change_tensors(change)
    problems = check_export(EXPORT)
    assert len(problems) >= 1
    assert re.search(message, " ".join(problems)), problems


CONFIG_FAULTS = {
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    "null": ({"draft_vocab_size": None}, "draft_vocab_size is None"),
    "theta moved": ({"rope_theta": 1.0}, "rope_theta is 1.0 and rope_parameters says"),
    "no layers": ({"eagle_config": {"use_aux_hidden_state": True}}, "silently capture default layers"),
    "one layer": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3], "use_aux_hidden_state": True}},
        "skips fc silently",
    ),
    "not ascending": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 3, 1], "use_aux_hidden_state": True}},
        "not distinct and ascending",
    ),
    "bias": ({"bias": True}, "bias is true"),
    "norm flag": ({"norm_output": True}, "norm_output is True, but the draft was trained without it"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_is_found(exported, fault):
    fields, message = CONFIG_FAULTS[fault]
    change_config(**fields)
    assert message in " ".join(check_export(EXPORT))


def test_an_interrupted_export_is_no_export(exported):
    (EXPORT / "model.safetensors").unlink()
    assert "not there" in check_export(EXPORT)[0]
