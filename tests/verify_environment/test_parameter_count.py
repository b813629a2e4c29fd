"""Parameters counted from a config, against the model that transformers builds from it."""

import pytest

from tasks.verify_environment.parameters import count_parameters

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT = {
    **SMALL,
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
CONFIGS = {
    "LlamaConfig": {**SMALL, "tie_word_embeddings": True},
    "Qwen2Config": SMALL,
    "Qwen3Config": {**SMALL, "head_dim": 128},
    "Qwen3MoeConfig": {**SMALL, **EXPERTS, "num_experts": 8, "head_dim": 64, "mlp_only_layers": [0]},
    "DeepseekV3Config": {**LATENT, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "Glm4MoeLiteConfig": LATENT,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_is_that_of_the_built_model(name):
    import torch
    import transformers

    config = getattr(transformers, name)(**CONFIGS[name])
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    counted, _ = count_parameters(config)
    assert counted == pytest.approx(sum(parameter.numel() for parameter in built.parameters()), rel=3e-3)


def test_a_token_of_deepseek_v3_multiplies_with_37_billion_of_671_billion():
    from transformers import DeepseekV3Config

    total, active = count_parameters(DeepseekV3Config())
    assert total == pytest.approx(671e9, rel=1e-2)
    assert active == pytest.approx(37e9, rel=2e-2)
