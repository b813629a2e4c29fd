"""Attention over the slots of SGLang's KV cache.

One layer's cache is a table of slots: `k_buffer` [slots, kv_heads, head_dim] and `v_buffer`
[slots, kv_heads, v_head_dim]. `req_to_token` [requests, positions] int32 names the slot of each position of
each request. Queries, keys, values and the cache share one dtype.

SGLang reaches these two through `torch.ops.sgl_kernel`, so they are registered as operators. The loops run
once per request; reading the few lengths as Python integers costs under a microsecond, the matrix products
of a layer cost a thousand.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend_attention_cpu(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
):
    """Attention of several new tokens per request: a prompt, its next chunk, or drafts to verify.

    The new tokens of request i are rows `extend_start_loc[i]` and the `extend_seq_lens[i]` from there on of

        q_extend  [tokens, heads, head_dim]
        k_extend  [tokens, kv_heads, head_dim]
        v_extend  [tokens, kv_heads, v_head_dim]
        o_extend  [tokens, heads, v_head_dim], written in place

    and are the last of its `seq_lens[i]` positions. The earlier ones are read from the cache, through row
    `req_pool_indices[i]` of `req_to_token`. All four index tensors are [requests], int32 or int64.

    New token a sees every earlier position, and of the new ones those up to itself; with `tree_mask`, a flat
    bool concatenation of [new, new] per request, those b where `tree_mask[a, b]` is true.

    `k_scale`, `v_scale` belong to a quantised cache and `max_len_extend` to a kernel's tiling: both unused.
    """
    if k_extend is None or v_extend is None:
        raise NotImplementedError("sgl_kernel (CPU stand-in): a layer that borrows another layer's keys and values.")
    if not is_causal:
        raise NotImplementedError("sgl_kernel (CPU stand-in): encoder attention that is not causal.")
    _refuse_what_llama_never_asks(
        q_extend, k_buffer, logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks
    )
    mask_start = 0
    for row, length, start, new in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        tokens = slice(start, start + new)
        prefix = length - new
        slots = req_to_token[row, :prefix]
        visible = None
        if tree_mask is not None:
            visible = torch.ones(new, length, dtype=torch.bool)
            visible[:, prefix:] = tree_mask[mask_start : mask_start + new * new].view(new, new)
            mask_start += new * new
        elif prefix > 0 and new > 1:
            visible = torch.ones(new, length, dtype=torch.bool).tril_(prefix)
        o_extend[tokens] = _heads_first_attention(
            q_extend[tokens].transpose(0, 1),
            _cached_then_new(k_buffer, slots, k_extend[tokens]).transpose(0, 1),
            _cached_then_new(v_buffer, slots, v_extend[tokens]).transpose(0, 1),
            sm_scale,
            visible,
            is_causal=visible is None and prefix == 0,
        ).transpose(0, 1)


def decode_attention_cpu(
    query,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
):
    """Attention of one new token per request; its key and value are written to the cache first.

        query   [requests, heads, head_dim]
        key     [requests, kv_heads, head_dim], or None when the cache already holds it (likewise value)
        value   [requests, kv_heads, v_head_dim]
        loc     [requests] int64, the slots to write
        output  [requests, heads, v_head_dim], written in place

    Token i then sees all `seq_lens[i]` positions of row `req_pool_indices[i]` of `req_to_token`; both are
    [requests] int64. `attn_logits` is a kernel's scratch space and, like the scales, unused.
    """
    _refuse_what_llama_never_asks(query, k_buffer, logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    kv_heads, head_dim = k_buffer.shape[1:]
    if key is not None:
        k_buffer.index_copy_(0, loc, key.view(-1, *k_buffer.shape[1:]))
        v_buffer.index_copy_(0, loc, value.view(-1, *v_buffer.shape[1:]))
    # The query heads that share a key head become its rows, so that each key is read once.
    grouped_query = query.view(query.shape[0], kv_heads, -1, head_dim)
    grouped_output = output.view(output.shape[0], kv_heads, -1, output.shape[-1])
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length]
        # index_select, not k_buffer[slots]: it takes int32 and copies whole rows, several times faster.
        grouped_output[i] = _heads_first_attention(
            grouped_query[i],
            k_buffer.index_select(0, slots).transpose(0, 1),
            v_buffer.index_select(0, slots).transpose(0, 1),
            sm_scale,
        )


def _heads_first_attention(query, key, value, scale, visible=None, is_causal=False):
    """softmax(query key^T scale) value, each [heads, tokens, dim]; query may have a multiple of key's heads."""
    # The batch dimension of one is what selects the fused CPU kernel.
    return scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=visible,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]


def _cached_then_new(buffer, slots, new):
    """The rows of `buffer` at `slots`, then `new`, which a model may have left out of the buffer."""
    cached = len(slots)
    if cached == 0:
        return new
    rows = new.new_empty(cached + len(new), *new.shape[1:])
    torch.index_select(buffer, 0, slots, out=rows[:cached])
    rows[cached:] = new
    return rows


def _refuse_what_llama_never_asks(query, k_buffer, logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks):
    if is_cross_attn or encoder_lens is not None:
        raise NotImplementedError("sgl_kernel (CPU stand-in): cross-attention to an encoder.")
    if logit_cap:
        raise NotImplementedError(f"sgl_kernel (CPU stand-in): soft-capped attention logits (logit_cap {logit_cap}).")
    if sinks is not None:
        raise NotImplementedError("sgl_kernel (CPU stand-in): attention sinks.")
    # SGLang passes a layer's window + 1, and -1 stands for no window.
    if sliding_window_size > 0:
        raise NotImplementedError(
            f"sgl_kernel (CPU stand-in): sliding-window attention (window {sliding_window_size - 1})."
        )
    if k_buffer.dtype != query.dtype:
        raise NotImplementedError(
            f"sgl_kernel (CPU stand-in): a KV cache in {k_buffer.dtype} under a model in {query.dtype}; "
            "start the server with --kv-cache-dtype auto."
        )


_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
_operators.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, "
    "Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "SymInt max_len_extend, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
_operators.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_operators.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
_operators.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
