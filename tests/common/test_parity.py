"""The search names the state of the target that was really captured, on a real forward of a tiny random Llama."""

import pytest
import torch

from tasks.common.parity import Agreement, all_states, find_state, layer_outputs


@pytest.fixture(scope="module")
def model(tiny_model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(3, 320, (24,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


@pytest.fixture(scope="module")
def hidden_states(model, input_ids):
    """transformers' own: [k + 1] is the output of layer k, the last one normed."""
    with torch.inference_mode():
        return [h[0] for h in model(input_ids.long()[None], output_hidden_states=True).hidden_states]


def test_layer_outputs_are_those_of_transformers(model, input_ids, hidden_states):
    for layer, output in zip((0, 3, 6), layer_outputs(model, input_ids, (0, 3, 6)), strict=True):
        assert torch.equal(output, hidden_states[layer + 1])


@pytest.mark.parametrize("layer", [0, 3, 6])
def test_a_planted_layer_is_named_with_its_margin(model, input_ids, hidden_states, layer):
    noisy = hidden_states[layer + 1] + 1e-5 * torch.randn_like(hidden_states[layer + 1])
    match = find_state(noisy, all_states(model, input_ids))
    assert match.name == f"the output of layer {layer}"
    assert match.error < 1e-3 < 0.05 < match.runner_up_error


def test_the_embedding_is_told_from_layer_0(model, input_ids, hidden_states):
    assert find_state(hidden_states[0], all_states(model, input_ids)).name == "the embedding"


def test_pre_and_post_norm_are_told_apart(model, input_ids, hidden_states):
    states = all_states(model, input_ids)
    assert find_state(hidden_states[8], states).name == "the output of layer 7 after the final norm"
    raw = layer_outputs(model, input_ids, (7,))[0]
    assert find_state(raw, states).name == "the output of layer 7"
    normed = model.model.layers[4].input_layernorm(hidden_states[4])
    assert find_state(normed, states).name == "the output of layer 3 after the input norm of layer 4"


def test_a_state_without_its_residual_is_named(model, input_ids):
    states = all_states(model, input_ids)
    branch = states["the MLP branch of layer 2, without the residual"]
    assert find_state(branch.clone(), states).name == "the MLP branch of layer 2, without the residual"


def test_one_huge_token_does_not_hide_the_others():
    """The first token's state is often many times larger than the rest and the same in neighbouring layers."""
    reference = torch.ones(10, 8)
    reference[0] *= 1000
    served = reference.clone()
    served[1:] = 2.0
    assert Agreement.of(served, reference).relative_error == pytest.approx(0.9)


def test_equal_states_agree_exactly(hidden_states):
    agreement = Agreement.of(hidden_states[3], hidden_states[3])
    assert (agreement.relative_error, agreement.norm_ratio) == (0, 1)
    assert agreement.cosine == pytest.approx(1)
