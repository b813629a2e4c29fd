"""How many parameters a decoder-only model has, from its config alone."""

from typing import Any


def count_parameters(config: Any) -> tuple[int, int]:
    """Count a dense or mixture-of-experts decoder with grouped-query or latent (MLA) attention.

    Norms, biases and routing corrections are left out: below 0.1 % of any real model.

    Args:
        config: a `transformers` config (`text_config` where nested).

    Returns:
        (all parameters, those that one token's forward pass multiplies with: the head included, the input
        embedding and the experts that it is not routed to left out).
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    embedding = text.vocab_size * hidden
    attention = _latent_attention(text) if getattr(text, "kv_lora_rank", None) else _grouped_attention(text)
    moe_layers = _moe_layers(text)
    dense = (layers - moe_layers) * 3 * hidden * text.intermediate_size
    total_moe, active_moe = _mixture(text) if moe_layers else (0, 0)
    shared = layers * attention + dense
    total = shared + moe_layers * total_moe + embedding * (1 if config.tie_word_embeddings else 2)
    return total, shared + moe_layers * active_moe + embedding


def _grouped_attention(text: Any) -> int:
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    return text.hidden_size * head_dim * (2 * heads + 2 * key_value_heads)


def _latent_attention(text: Any) -> int:
    """Multi-head latent attention: low-rank q (where q_lora_rank is set) and kv (DeepSeek-V2, section 2.1)."""
    hidden, heads = text.hidden_size, text.num_attention_heads
    query_key = text.qk_nope_head_dim + text.qk_rope_head_dim
    rank = getattr(text, "q_lora_rank", None)
    query = rank * (hidden + heads * query_key) if rank else hidden * heads * query_key
    down = hidden * (text.kv_lora_rank + text.qk_rope_head_dim)
    up = text.kv_lora_rank * heads * (text.qk_nope_head_dim + text.v_head_dim)
    return query + down + up + heads * text.v_head_dim * hidden


def _experts(text: Any) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((value for name in names if (value := getattr(text, name, None))), 0)


def _moe_layers(text: Any) -> int:
    if not _experts(text):
        return 0
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds:
        return sum(kind == "sparse" for kind in kinds)
    dense = getattr(text, "first_k_dense_replace", None) or len(getattr(text, "mlp_only_layers", None) or ())
    return text.num_hidden_layers - dense


def _mixture(text: Any) -> tuple[int, int]:
    """(all, active) parameters of one mixture-of-experts layer: routed and shared experts, router."""
    hidden = text.hidden_size
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    expert, experts = 3 * hidden * width, _experts(text)
    always = (getattr(text, "n_shared_experts", None) or 0) * expert + hidden * experts
    always += 3 * hidden * (getattr(text, "shared_expert_intermediate_size", None) or 0)
    return experts * expert + always, text.num_experts_per_tok * expert + always
