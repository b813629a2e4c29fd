"""Configs as other tools spell them, at tiny sizes: none is called broken for its spelling.

Keys and forms are those that SpecForge, NVIDIA's Model Optimizer and speculators write; values are ours.
"""

import json

import pytest
import torch

from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import HIDDEN, VOCAB, Checkpoint, sglang_draft, speculators_draft

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLMEagle3"],
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}
CONFIGS = {
    "SpecForge, names its type as transformers 5 does": (
        "deepseek",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
            "max_window_layers": 48,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "transformers_version": "4.57.0",
            "use_sliding_window": False,
        },
    ),
    "SpecForge, without RoPE and without use_aux_hidden_state": (
        "deepseek",
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
            "pad_token_id": 0,
            "torch_dtype": "float16",
            "transformers_version": "4.28.1",
        },
    ),
    "SpecForge, theta as a whole number, several ends": (
        "qwen3",
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
            "eos_token_id": [1, 2],
            "rope_theta": 1000000,
            "target_model_type": "qwen3",
            "torch_dtype": "bfloat16",
        },
    ),
    "Model Optimizer, its own keys in eagle_config": (
        "llama",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
                "next_layer_regular": True,
                "parallel_draft_heads_num_layers": None,
                "parallel_draft_step": 1,
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
            "mlp_bias": False,
            "pad_token_id": None,
            "pretraining_tp": None,
            "rope_scaling": LLAMA3_SCALING,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
        },
    ),
}


def as_type(draft: Checkpoint) -> Checkpoint:
    dtype = getattr(torch, draft.config.get("torch_dtype") or draft.config["dtype"])
    draft.tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in draft.tensors.items()}
    return draft


def errors(draft: Checkpoint, folder, target) -> dict[str, str]:
    _, checks = examine(Request(as_type(draft).write(folder), target))
    return {check.id: check.found for check in checks if check.verdict == "error"}


def test_a_draft_that_names_no_layers_may_have_been_trained_on_the_default_ones(tmp_path, write_target):
    """As EAGLE's own code writes it: no eagle_config, no RoPE."""
    draft = sglang_draft("deepseek")
    draft.config, draft.record = SIZES | {"torch_dtype": "float16", "pad_token_id": 0}, False
    assert errors(draft, tmp_path / "draft", write_target("deepseek")) == {}
    draft.record = True
    assert list(errors(draft, tmp_path / "draft", write_target("deepseek"))) == ["C2 eagle_config"]


def test_weights_of_one_other_type_than_the_config_says_are_a_warning(tmp_path, write_target):
    draft = sglang_draft()
    draft.record = False
    folder = draft.write(tmp_path / "draft")
    (folder / "config.json").write_text(json.dumps(draft.config | {"torch_dtype": "float16"}))
    _, checks = examine(Request(folder, write_target()))
    assert {check.id: check.verdict for check in checks}["C10 dtype"] == "warning"


@pytest.mark.parametrize("spelled", CONFIGS)
def test_a_published_spelling_is_no_error(spelled, tmp_path, write_target):
    kind, keys = CONFIGS[spelled]
    draft = sglang_draft(kind)
    draft.config, draft.record = SIZES | keys, False
    assert errors(draft, tmp_path / "draft", write_target(kind)) == {}


def test_model_optimizers_tensors_are_no_error(tmp_path, write_target):
    """layers.0.*, and no t2d, which SGLang does not read."""
    _, keys = CONFIGS["Model Optimizer, its own keys in eagle_config"]
    draft = sglang_draft()
    draft.config, draft.record = SIZES | keys, False
    draft.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft.tensors.items()}
    del draft.tensors["t2d"]
    assert errors(draft, tmp_path / "draft", write_target()) == {}


def test_eagles_own_weights_in_a_pickle_are_no_error(tmp_path, write_target):
    """pytorch_model.bin in float16, with the embedding that the server shares, beside what the trainer left."""
    _, keys = CONFIGS["SpecForge, without RoPE and without use_aux_hidden_state"]
    draft = sglang_draft("deepseek")
    draft.config, draft.record = SIZES | keys, False
    draft.tensors["embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
    folder = as_type(draft).write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    torch.save(draft.tensors, folder / "pytorch_model.bin")
    (folder / "training_state.pt").write_bytes(b"")
    _, checks = examine(Request(folder, write_target("deepseek")))
    assert [check.id for check in checks if check.verdict == "error"] == []


@pytest.mark.parametrize("architectures", [["Eagle3Speculator"], ["Eagle3DraftModel"]])
@pytest.mark.parametrize("verifier", [["LlamaForCausalLM"], ["LlamaForCausalLMEagle3"], []])
@pytest.mark.parametrize("beside", [True, False], ids=["with target", "alone"])
def test_what_speculators_writes_is_no_error(tmp_path, write_target, architectures, verifier, beside):
    """A converted draft calls its own class the verifier's."""
    draft = speculators_draft()
    draft.config |= {
        "architectures": architectures,
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "dtype": draft.config.pop("torch_dtype"),
        "enable_sp_ulysses": False,
        "norm_before_fc": False,
        "speculators_version": "0.3.0",
        "transformers_version": "4.57.1",
    }
    draft.config["speculators_config"] = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"architectures": verifier, "name_or_path": "someone/model"},
    }
    assert errors(draft, tmp_path / "draft", write_target() if beside else None) == {}


def test_layers_that_the_form_names_otherwise_are_still_an_error(tmp_path, write_target):
    """So that the tests above could fail: the same spelling with ids that capture other layers than it records."""
    draft = sglang_draft("deepseek")
    _, keys = CONFIGS["SpecForge, names its type as transformers 5 does"]
    draft.config = json.loads(json.dumps(SIZES | keys))
    assert list(errors(draft, tmp_path / "draft", write_target("deepseek"))) == ["C3 layers"]
