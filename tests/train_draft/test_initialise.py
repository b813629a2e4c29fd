"""Where training starts."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common import draft as draft_module
from tasks.common.draft import Eagle3Draft
from tasks.common.draft_layer import finish
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.params import ContractParams
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.induction import training_states, without_first_tokens
from tasks.train_draft.initialise import initialise
from tests.reference import make_batch
from tests.stored import copy_of, write_split

VOCAB_MAP = VocabMap(torch.arange(3, 103, 2), 320, "test")


@pytest.fixture
def shape(project) -> TargetShape:
    return TargetShape.of(load_config())


@pytest.fixture
def states(project, tiny_model_folder) -> HiddenStates:
    """Forty samples in which 15 random tokens come twice; the first aux slot is a rotated embedding, the others noise."""
    embeddings = TargetWeights(tiny_model_folder).embed_tokens()
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    samples = []
    for n in range(40):
        ids = torch.randperm(320, generator=generator)[:15].repeat(2)
        aux = torch.randn(30, 3, 64, generator=generator)
        aux[:, 0] = embeddings[ids] @ rotation
        samples.append(Sample(f"copy-{n}", ids.int(), torch.ones(30, dtype=torch.uint8), aux, torch.zeros(30, 64)))
    return write_split(project, target_contract(ContractParams()), [samples])


def new_draft(shape: TargetShape, weights: TargetWeights | None = None) -> Eagle3Draft:
    embeddings = weights.embed_tokens() if weights else torch.zeros(320, 64)
    return Eagle3Draft.for_target(shape, target_contract(ContractParams()), 50, embeddings)


def share_copied(draft: Eagle3Draft, samples: list[Sample], head: torch.Tensor) -> float:
    """How often the attention alone points at x_{t+2}, over positions whose x_{t+1} was seen before."""
    attended, batch = [], make_batch(samples, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_module, "finish", lambda mixed, *rest: attended.append(mixed) or finish(mixed, *rest))
        draft.unroll(batch.inputs, batch.samples.aux)
    rows, packed = batch.inputs.rows.index, batch.samples
    second = packed.positions[rows] >= 14
    wanted = packed.input_ids[packed.ahead(2)[rows[second]]]
    pointed = attended[0].flatten(1)[second] @ draft.midlayer.self_attn.o_proj.weight.T
    return ((pointed @ head.T).argmax(-1) == wanted).float().mean().item()


def tied_folder(tmp_path, tiny_model_folder):
    """The tiny target without a head of its own."""
    tensors = load_file(tiny_model_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    (tmp_path / "tied").mkdir()
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    write_json(tmp_path / "tied" / "config.json", {"model_type": "llama"})
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
    write_json(folder / "config.json", {"model_type": "llama"})
    return folder, tensors["lm_head.weight"]


def test_no_parameter_stays_unset(shape, tiny_model_folder, states):
    for weights in (None, TargetWeights(tiny_model_folder)):
        draft = new_draft(shape, weights)
        initialise(draft, VOCAB_MAP, 0, shape, weights, lambda: training_states(states))
        assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_a_slot_that_was_never_captured_is_named(states):
    samples = [copy_of(states.read(index)) for index in range(4)]
    for sample in samples:
        sample.aux[:, 1] = 0
    with pytest.raises(
        DraftlineError, match="aux slot 1 holds the same values at all 116 tokens of samples copy-0 to copy-3"
    ):
        without_first_tokens(samples)


def test_head_rows_are_the_targets_rows_of_the_draft_vocabulary(shape, tiny_model_folder, states):
    weights, target = TargetWeights(tiny_model_folder), load_file(tiny_model_folder / "model.safetensors")
    draft = new_draft(shape, weights)
    initialise(draft, VOCAB_MAP, 0, shape, weights, lambda: training_states(states))
    assert torch.equal(draft.lm_head.weight, target["lm_head.weight"][3:103:2])
    assert torch.equal(draft.midlayer.mlp.up_proj.weight, target["model.layers.7.mlp.up_proj.weight"])


def test_fc_starts_by_choosing_the_last_slot(shape, tiny_model_folder, states):
    """But for the directions that carry the code of the token: at most a quarter."""
    weights = TargetWeights(tiny_model_folder)
    draft, aux = new_draft(shape, weights), torch.randn(500, 3 * 64, generator=torch.Generator().manual_seed(0))
    initialise(draft, VOCAB_MAP, 0, shape, weights, lambda: training_states(states))
    aux[:, :64] = 0
    chosen = aux @ draft.fc.weight.T * aux[:, 128:]
    assert 0.7 < chosen.sum() / aux[:, 128:].pow(2).sum() < 0.9


# 32 value dimensions say less of a head that has nothing to do with the embedding.
@pytest.mark.parametrize(("tied", "least"), [(False, 0.2), (True, 0.5)])
def test_attention_starts_by_copying_what_followed_the_last_time(
    tmp_path, shape, tiny_model_folder, states, tied, least
):
    weights = TargetWeights(tied_folder(tmp_path, tiny_model_folder)[0] if tied else tiny_model_folder)
    samples = [states.read(index) for index in range(20)]
    shares = []
    for start in (None, weights):
        draft = new_draft(shape, weights)
        initialise(draft, VOCAB_MAP, 0, shape, start, lambda: training_states(states))
        shares.append(share_copied(draft, samples, weights.lm_head()))
    from_random, from_target = shares
    assert from_random < 0.05
    assert from_target > least


@pytest.mark.parametrize("layout", [tied_folder, sharded_folder])
def test_a_tied_and_a_sharded_target_can_be_read(shape, tmp_path, tiny_model_folder, states, layout):
    folder, head = layout(tmp_path, tiny_model_folder)
    weights = TargetWeights(folder)
    draft = new_draft(shape, weights)
    initialise(draft, VOCAB_MAP, 0, shape, weights, lambda: training_states(states))
    assert torch.equal(draft.lm_head.weight, head[3:103:2])


@pytest.mark.parametrize(
    ("family", "norm_before_mlp", "stored_less"),
    [("llama", "post_attention", 0), ("qwen3_next", "post_attention", 1), ("gemma3_text", "pre_feedforward", 1)],
)
def test_the_norm_before_the_mlp_multiplies_by_what_the_targets_does(
    shape, tmp_path, tiny_model_folder, states, family, norm_before_mlp, stored_less
):
    tensors = load_file(tiny_model_folder / "model.safetensors")
    multiplies_by = torch.rand(64) + 0.5
    tensors[f"model.layers.7.{norm_before_mlp}_layernorm.weight"] = multiplies_by - stored_less
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": family})
    weights = TargetWeights(tmp_path)
    draft = new_draft(shape, weights)
    initialise(draft, VOCAB_MAP, 0, shape, weights, lambda: training_states(states))
    assert torch.allclose(draft.midlayer.post_attention_layernorm.weight, multiplies_by)
