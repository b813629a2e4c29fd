"""infra/sglang_cpu: attention against a slow and obvious reading of what SGLang asks of it."""

import pytest
import torch

import tests.infra.stand_in  # noqa: F401 - it declares the operators

HEADS, KV_HEADS, HEAD_DIM, SCALE = 6, 2, 8, 0.3
SLOTS, POSITIONS = 96, 16


class Cache:
    """One layer's cache with the positions of each request in random slots, and NaN wherever nothing was written."""

    def __init__(self, lengths, dtype=torch.float32, value_dim=HEAD_DIM):
        batch = len(lengths)
        self.req_to_token = torch.randperm(SLOTS)[: (batch + 1) * POSITIONS].int().view(batch + 1, POSITIONS)
        self.rows = torch.randperm(batch + 1)[:batch]
        self.keys = [torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, value_dim).to(dtype) for n in lengths]
        self.k_buffer = torch.full((SLOTS, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
        self.v_buffer = torch.full((SLOTS, KV_HEADS, value_dim), torch.nan, dtype=dtype)

    def slots(self, request):
        return self.req_to_token[self.rows[request], : len(self.keys[request])].long()

    def fill(self, counts):
        """Write the first positions of each request."""
        for i, count in enumerate(counts):
            self.k_buffer[self.slots(i)[:count]] = self.keys[i][:count]
            self.v_buffer[self.slots(i)[:count]] = self.values[i][:count]
        return self


def attention_of_one(query, keys, values, seen):
    """One token's attention, [heads, value_dim], to the positions in `seen`: softmax(q k / scale) v, head by head."""
    heads = []
    for head, q in enumerate(query.double()):
        shared = head // (HEADS // KV_HEADS)
        scores = torch.stack([q @ keys[position, shared].double() * SCALE for position in seen])
        weights = scores.exp() / scores.exp().sum()
        heads.append(sum(w * values[p, shared].double() for w, p in zip(weights, seen, strict=True)))
    return torch.stack(heads)


# What a Llama's layer asks of both operators, in their order.
PLAIN = {
    "sm_scale": SCALE,
    "logit_cap": 0.0,
    "is_cross_attn": False,
    "sliding_window_size": 0,
    "encoder_lens": None,
    "sinks": None,
}


def extend(cache, prefixes, tree_mask=None, index_dtype=torch.int64, **changes):
    """Call the operator as SGLang does, on the positions after `prefixes`; returns queries and outputs by request."""
    new = torch.tensor([len(k) - p for k, p in zip(cache.keys, prefixes, strict=True)], dtype=index_dtype)
    keys = torch.cat([k[p:] for k, p in zip(cache.keys, prefixes, strict=True)])
    values = torch.cat([v[p:] for v, p in zip(cache.values, prefixes, strict=True)])
    queries = torch.randn(len(keys), HEADS, HEAD_DIM).to(keys.dtype)
    outputs = torch.full((len(keys), HEADS, values.shape[-1]), torch.nan, dtype=keys.dtype)
    arguments = {
        "q_extend": queries,
        "k_extend": keys,
        "v_extend": values,
        "o_extend": outputs,
        "k_buffer": cache.k_buffer,
        "v_buffer": cache.v_buffer,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "req_to_token": cache.req_to_token,
        "req_pool_indices": cache.rows,
        "seq_lens": torch.tensor([len(k) for k in cache.keys]),
        "extend_seq_lens": new,
        "extend_start_loc": (new.cumsum(0) - new).to(index_dtype),
        "max_len_extend": int(new.max()),
        **PLAIN,
        "tree_mask": tree_mask,
        "is_causal": True,
    }
    torch.ops.sgl_kernel.extend_attention_cpu(*(arguments | changes).values())
    return queries.split(new.tolist()), outputs.split(new.tolist())


def decode(cache, new=True, **changes):
    """Call the operator as SGLang does, on each request's last position; returns queries and outputs."""
    batch = len(cache.keys)
    queries = torch.randn(batch, HEADS, HEAD_DIM).to(cache.k_buffer.dtype)
    outputs = torch.full((batch, HEADS, cache.v_buffer.shape[-1]), torch.nan, dtype=cache.k_buffer.dtype)
    arguments = {
        "query": queries,
        "k_buffer": cache.k_buffer,
        "v_buffer": cache.v_buffer,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "output": outputs,
        "key": torch.stack([k[-1] for k in cache.keys]) if new else None,
        "value": torch.stack([v[-1] for v in cache.values]) if new else None,
        "loc": torch.stack([cache.slots(i)[-1] for i in range(batch)]),
        "attn_logits": torch.empty(0),
        "req_to_token": cache.req_to_token,
        "req_pool_indices": cache.rows,
        "seq_lens": torch.tensor([len(k) for k in cache.keys]),
        **PLAIN,
    }
    torch.ops.sgl_kernel.decode_attention_cpu(*(arguments | changes).values())
    return queries, outputs


def assert_close(actual, expected, dtype=torch.float32):
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


dtypes_and_widths = pytest.mark.parametrize(
    ("dtype", "value_dim"), [(torch.float32, HEAD_DIM), (torch.float32, 4), (torch.bfloat16, HEAD_DIM)]
)


@dtypes_and_widths
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_new_token_sees_the_cached_prefix_and_the_new_tokens_up_to_itself(dtype, value_dim, index_dtype):
    """A prompt, its next chunk, a single token, and a prompt of one token, in one batch. The new tokens' own slots
    hold NaN: their keys and values are those handed in."""
    prefixes = [0, 5, 6, 0]
    cache = Cache([4, 8, 7, 1], dtype, value_dim).fill(prefixes)
    queries, outputs = extend(cache, prefixes, index_dtype=index_dtype)
    for i, prefix in enumerate(prefixes):
        for a, query in enumerate(queries[i]):
            seen = range(prefix + a + 1)
            assert_close(outputs[i][a], attention_of_one(query, cache.keys[i], cache.values[i], seen), dtype)


@pytest.mark.parametrize("prefixes", [[5, 0], [3, 7]])
def test_a_draft_sees_the_prefix_and_its_own_branch(prefixes):
    """Each request has a tree of its own: the masks lie one after the other."""
    new = [4, 3]
    cache = Cache([p + n for p, n in zip(prefixes, new, strict=True)]).fill(prefixes)
    masks = [torch.rand(n, n) < 0.4 for n in new]
    for mask in masks:
        mask.fill_diagonal_(True)
    queries, outputs = extend(cache, prefixes, tree_mask=torch.cat([mask.flatten() for mask in masks]))
    for i, prefix in enumerate(prefixes):
        for a, query in enumerate(queries[i]):
            seen = [*range(prefix), *(prefix + b for b in range(new[i]) if masks[i][a, b])]
            assert_close(outputs[i][a], attention_of_one(query, cache.keys[i], cache.values[i], seen))


@dtypes_and_widths
def test_a_decoded_token_sees_every_position_and_enters_the_cache(dtype, value_dim):
    lengths = [5, 1, 9]
    cache = Cache(lengths, dtype, value_dim).fill([n - 1 for n in lengths])
    queries, outputs = decode(cache)
    for i, length in enumerate(lengths):
        expected = attention_of_one(queries[i], cache.keys[i], cache.values[i], range(length))
        assert_close(outputs[i], expected, dtype)
        assert torch.equal(cache.k_buffer[cache.slots(i)], cache.keys[i])
        assert torch.equal(cache.v_buffer[cache.slots(i)], cache.values[i])


def test_decoding_reads_a_key_that_is_already_cached():
    cache = Cache([5, 3]).fill([5, 3])
    before = cache.k_buffer.clone()
    queries, outputs = decode(cache, new=False)
    for i, length in enumerate([5, 3]):
        assert_close(outputs[i], attention_of_one(queries[i], cache.keys[i], cache.values[i], range(length)))
    assert torch.equal(cache.k_buffer.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"is_cross_attn": True}, "cross-attention"),
        ({"encoder_lens": torch.tensor([3])}, "cross-attention"),
        ({"logit_cap": 30.0}, "soft-capped attention logits .logit_cap 30"),
        ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
        ({"sliding_window_size": 5}, "sliding-window attention .window 4"),
        ({"k_buffer": torch.zeros(SLOTS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)}, "--kv-cache-dtype auto"),
    ],
)
@pytest.mark.parametrize("call", [decode, lambda cache, **changes: extend(cache, [2], **changes)])
def test_attention_refuses_what_a_dense_llama_never_asks(call, change, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        call(Cache([4]).fill([4]), **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k_extend": None}, "another layer's keys"),
        ({"v_extend": None}, "another layer's"),
        ({"is_causal": False}, "causal"),
    ],
)
def test_a_prompt_refuses_shared_layers_and_encoders(change, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        extend(Cache([4]).fill([4]), [2], **change)
