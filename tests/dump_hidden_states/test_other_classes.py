"""Real SGLang servers with hooks over random targets of other classes than Llama: their states are transformers' too."""

import shutil

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tasks.common.target import TARGET, target_contract
from tasks.dump_hidden_states.engines import open_engine
from tasks.prepare_target.prepare import prepare_target
from tests.dump_hidden_states.hooked_server import (
    alone_in_transformers,
    assert_layers_differ,
    assert_same,
    dumped,
    params_of,
    random_sequences,
    shard_of,
)

pytestmark = pytest.mark.faults  # a server each

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))


def gemma3() -> PreTrainedModel:
    """SGLang calls its layers by keyword, and each returns a pair. On a CPU no layer may have a sliding window."""
    whole = ["full_attention"] * SIZES["num_hidden_layers"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16, layer_types=whole))


@pytest.mark.parametrize("make", [qwen3, gemma3])
def test_states_are_transformers_at_every_layer(tmp_path, monkeypatch, tiny_model_folder, make):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)  # for its tokenizer
    torch.manual_seed(0)
    model = make()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, weight.mean().item(), 0.2)
    model.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    params, sequences = params_of(folder), random_sequences()
    prepare_target(params.target, TARGET)
    alone = alone_in_transformers(params, sequences)
    assert_layers_differ(alone)
    with open_engine(params, target_contract(params.contract)) as compute:
        assert_same(dumped(compute, "states", [shard_of(sequences)]), alone)
