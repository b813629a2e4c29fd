"""Where training starts."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.draft import Eagle3Draft
from tasks.common.files import write_json
from tasks.common.params import ContractParams
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.initialise import initialise

VOCAB_MAP = VocabMap(torch.arange(3, 103, 2), 320, "test")


@pytest.fixture
def shape(project) -> TargetShape:
    return TargetShape.of(load_config())


def new_draft(shape: TargetShape) -> Eagle3Draft:
    return Eagle3Draft.for_target(shape, target_contract(ContractParams()), 50, torch.zeros(320, 64))


def tied_folder(tmp_path, tiny_model_folder):
    """The tiny target without a head of its own."""
    tensors = load_file(tiny_model_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    (tmp_path / "tied").mkdir()
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    return tmp_path / "tied", tensors["model.embed_tokens.weight"]


def sharded_folder(tmp_path, tiny_model_folder):
    """The tiny target in two files with an index."""
    tensors = load_file(tiny_model_folder / "model.safetensors")
    folder, names = tmp_path / "sharded", sorted(tensors)
    folder.mkdir()
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in halves.items() for name in part}
    write_json(folder / "model.safetensors.index.json", {"weight_map": index})
    return folder, tensors["lm_head.weight"]


def test_no_parameter_stays_unset(shape, tiny_model_folder):
    for weights in (None, TargetWeights(tiny_model_folder)):
        draft = new_draft(shape)
        initialise(draft, VOCAB_MAP, 0, shape, weights)
        assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_head_rows_are_the_targets_rows_of_the_draft_vocabulary(shape, tiny_model_folder):
    draft, target = new_draft(shape), load_file(tiny_model_folder / "model.safetensors")
    initialise(draft, VOCAB_MAP, 0, shape, TargetWeights(tiny_model_folder))
    assert torch.equal(draft.lm_head.weight, target["lm_head.weight"][3:103:2])
    assert torch.equal(draft.midlayer.mlp.up_proj.weight, target["model.layers.7.mlp.up_proj.weight"])


def test_fc_starts_by_choosing_the_last_slot(shape, tiny_model_folder):
    draft, aux = new_draft(shape), torch.randn(5, 3 * 64)
    initialise(draft, VOCAB_MAP, 0, shape, TargetWeights(tiny_model_folder))
    torch.testing.assert_close(draft.fc(aux), aux[:, 128:])


@pytest.mark.parametrize("layout", [tied_folder, sharded_folder])
def test_a_tied_and_a_sharded_target_can_be_read(shape, tmp_path, tiny_model_folder, layout):
    folder, head = layout(tmp_path, tiny_model_folder)
    draft = new_draft(shape)
    initialise(draft, VOCAB_MAP, 0, shape, TargetWeights(folder))
    assert torch.equal(draft.lm_head.weight, head[3:103:2])
