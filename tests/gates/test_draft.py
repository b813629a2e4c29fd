import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.draft import Eagle3Draft
from tasks.common.files import ARTIFACTS, REPORTS, read_json, write_json
from tasks.common.params import ContractParams
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.vocab_map import VocabMap
from tasks.export_draft.export import export_draft

EXPORT = ARTIFACTS / "export"
WEIGHTS = EXPORT / "model.safetensors"
FORM = "SGLang would load the folder as it was trained: config, tensors, vocabulary map"
TENSORS = "Exactly the tensors that the config asks for, with their types and shapes"
ENOUGH = "Predicted acceptance length at serve.num_steps is at least gates.min_predicted_accept_length"
FACTS = "Contract, captured layers and hashes are those of this target and of the files"


@pytest.fixture
def exported(project) -> None:
    """A random draft of the tiny target, exported as every draft is, with a report that predicts 2.0 as it is served."""
    contract, shape = target_contract(ContractParams()), TargetShape.of(load_config())
    torch.manual_seed(0)
    draft = Eagle3Draft.for_target(shape, contract, 64, torch.randn(shape.vocab_size, shape.hidden_size))
    folder = ARTIFACTS / "draft"
    folder.mkdir(parents=True)
    save_file(
        {name: torch.randn_like(weight) for name, weight in draft.state_dict().items()}, folder / "draft.safetensors"
    )
    VocabMap(torch.arange(64) * 3, shape.vocab_size, "0" * 64).save(folder / "vocab_map.safetensors")
    described = {"contract": contract.model_dump(), "config": draft.config.to_dict(), "vocab_map_sha256": "0" * 64}
    write_json(folder / "draft.json", described)
    export_draft(folder, EXPORT, "float32")
    write_json(REPORTS / "train_draft.json", {"predicted_accept_lengths": [1.5, 1.8, 2.0, 3.0]})


def edit_tensors(change) -> None:
    save_file(change(load_file(WEIGHTS)), WEIGHTS)


def edit_config(**changes) -> None:
    write_json(EXPORT / "config.json", read_json(EXPORT / "config.json") | changes)


def test_an_exported_draft_passes(exported, judge):
    verdict = judge("draft")
    assert verdict.error == ""
    assert verdict.report["figures"]["draft vocabulary"] == 64
    assert "midlayer.self_attn.q_proj.weight" in verdict.page


def test_a_renamed_tensor_is_named_as_missing_and_as_unknown(exported, judge):
    edit_tensors(lambda t: {("fc.weights" if name == "fc.weight" else name): tensor for name, tensor in t.items()})
    verdict = judge("draft")
    assert sorted(verdict.samples(TENSORS)) == ["fc.weight", "fc.weights"]
    assert "tensor fc.weight is missing; SGLang would leave random values there" in verdict.error


def test_another_shape_is_named(exported, judge):
    edit_tensors(lambda t: t | {"fc.weight": t["fc.weight"][:, :64].clone()})
    assert judge("draft").samples(TENSORS) == ["fc.weight"]


def test_a_nan_is_named(exported, judge):
    edit_tensors(lambda t: t | {"norm.weight": t["norm.weight"] * float("nan")})
    assert judge("draft").samples("Every weight is finite") == ["norm.weight"]


def test_a_map_of_absolute_ids_is_refused(exported, judge):
    edit_tensors(lambda t: t | {"d2t": t["d2t"] + torch.arange(64)})
    assert "d2t" in judge("draft").findings[FORM]["samples"][0]["found"]


def test_a_config_that_names_shifted_layers_is_refused(exported, judge):
    eagle = read_json(EXPORT / "config.json")["eagle_config"]
    shifted = [layer + 1 for layer in eagle["eagle_aux_hidden_state_layer_ids"]]
    edit_config(eagle_config=eagle | {"eagle_aux_hidden_state_layer_ids": shifted})
    assert "layers that SGLang captures" in judge("draft").samples(FACTS)


def test_a_config_without_eagle_config_is_refused(exported, judge):
    edit_config(eagle_config=None)
    verdict = judge("draft")
    assert FORM in verdict.outcome("failed")
    assert verdict.outcome("broken") == []


def test_a_draft_of_another_target_is_refused(exported, judge):
    identity = read_json(ARTIFACTS / "target/draftline.json")
    write_json(ARTIFACTS / "target/draftline.json", identity | {"target_sha256": "1" * 64})
    verdict = judge("draft")
    assert verdict.outcome("failed") == [FACTS]
    assert verdict.samples(FACTS) == ["target_sha256"]


def test_weights_that_cannot_be_read_are_refused(exported, judge):
    WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:1000])
    assert "cannot be read" in judge("draft").findings[FORM]["samples"][0]["found"]


def test_a_draft_that_predicts_too_little_is_refused(exported, judge):
    verdict = judge("draft", gates={"min_predicted_accept_length": 2.1})
    assert verdict.outcome("failed") == [ENOUGH]


def test_what_is_judged_is_predicted_for_the_steps_that_are_served(exported, judge):
    limit, serve = {"min_predicted_accept_length": 1.9}, {"num_steps": 2, "num_draft_tokens": 3}
    assert judge("draft", gates=limit).error == ""
    assert judge("draft", gates=limit, serve=serve).outcome("failed") == [ENOUGH]
