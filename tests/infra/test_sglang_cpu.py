"""infra/sglang_cpu: each operator against a slow and obvious reading of what SGLang asks of it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

SGLANG_CPU = Path(__file__).parents[2] / "infra" / "sglang_cpu"

HEADS, KV_HEADS, HEAD_DIM, SCALE = 6, 2, 8, 0.3
SLOTS, POSITIONS = 96, 16


def load_kernel():
    """The package under a name of its own: a real sgl_kernel elsewhere in this process keeps its own."""
    folder = SGLANG_CPU / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel_stand_in", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel = load_kernel()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- attention


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
        "sm_scale": SCALE,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": 0,
        "encoder_lens": None,
        "sinks": None,
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
        "sm_scale": SCALE,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": 0,
        "encoder_lens": None,
        "sinks": None,
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


# --- slots


def slot_table(requests=4, positions=24):
    """No slot twice, so that a misplaced one shows."""
    return torch.randperm(requests * positions).int().view(requests, positions)


BATCH_ROWS = [2, 0, 3]
STARTS, ENDS = [3, 0, 5], [6, 0, 9]  # 3 positions, none, 4 positions


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_slots_are_entered_request_after_request(dtype):
    table, slots = slot_table(), torch.arange(1000, 1007)
    expected = table.clone()
    expected[2, 3:6] = torch.tensor([1000, 1001, 1002])
    expected[3, 5:9] = torch.tensor([1003, 1004, 1005, 1006])
    kernel.assign_req_to_token_pool_cpu(
        torch.tensor(BATCH_ROWS), table, torch.tensor(STARTS, dtype=dtype), torch.tensor(ENDS, dtype=dtype), slots, 24
    )
    assert torch.equal(table, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_read_back_and_the_rest_of_the_output_stays(dtype):
    table, slots = slot_table(), torch.full((9,), -5)
    kernel.assign_extend_cache_locs_cpu(
        torch.tensor(BATCH_ROWS), table, torch.tensor(STARTS, dtype=dtype), torch.tensor(ENDS, dtype=dtype), slots, 24
    )
    assert slots.tolist() == [*table[2, 3:6].tolist(), *table[3, 5:9].tolist(), -5, -5]


TOPK, STEPS, LENGTHS = 2, 3, [4, 0, 7]


def test_the_draft_writes_the_slots_after_the_sequence():
    table, slots = slot_table(), torch.empty(3 * TOPK * STEPS, dtype=torch.int64)
    kernel.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(BATCH_ROWS), table, torch.tensor(LENGTHS), slots, 24, TOPK, STEPS
    )
    expected = [table[row, n : n + 6].tolist() for row, n in zip(BATCH_ROWS, LENGTHS, strict=True)]
    assert slots.view(3, 6).tolist() == expected


def test_each_branch_reads_the_sequence_and_its_own_slots():
    table = slot_table()
    before = table.clone()
    branches = kernel.build_draft_decode_metadata_cpu(
        table, torch.tensor(BATCH_ROWS), torch.tensor(LENGTHS), TOPK, STEPS, 24
    )
    assert branches.shape == (3 * TOPK, 24)
    assert branches.dtype == torch.int32
    assert torch.equal(table, before)
    for i, (row, length) in enumerate(zip(BATCH_ROWS, LENGTHS, strict=True)):
        for branch in range(TOPK):
            own = table[row, length + branch * STEPS : length + (branch + 1) * STEPS]
            expected = [*table[row, :length].tolist(), *own.tolist()]
            assert branches[i * TOPK + branch, : length + STEPS].tolist() == expected


def test_accepted_slots_close_ranks():
    slots, accepted = torch.arange(100, 108), torch.zeros(6, dtype=torch.int64)
    kernel.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [4, -1, -1]]).int(), slots, accepted)
    assert accepted.tolist() == [100, 102, 104, 0, 0, 0]


def test_tokens_move_in_every_buffer_as_if_all_were_read_first():
    """Buffers of different widths; slots that are both read and written; moves to where a token already is."""
    buffers = [torch.randn(10, 2, 3), torch.randn(10, 2, 5), torch.randn(10, 4).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    moves = {1: 2, 2: 3, 5: 4, 4: 5, 0: 9, 7: 7}  # target: source
    kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers]),
        torch.tensor(list(moves)),
        torch.tensor(list(moves.values())),
    )
    for buffer, old in zip(buffers, before, strict=True):
        for slot in range(10):
            assert torch.equal(buffer[slot], old[moves.get(slot, slot)])


def test_nothing_is_read_when_no_token_moves():
    """SGLang warms up with slot 0 onto slot 0, many times; address 1 would crash."""
    stay = torch.zeros(128, dtype=torch.int64)
    kernel.copy_all_layer_kv_cache_cpu(torch.tensor([1], dtype=torch.uint64), torch.tensor([8]), stay, stay)


# --- the draft tree


def tree_outputs(batch, nodes):
    return {
        "tree_mask": torch.ones(batch * nodes * nodes, dtype=torch.bool),
        "positions": torch.full((batch * nodes,), -7),
        "retrive_index": torch.full((batch, nodes), -1),
        "retrive_next_token": torch.full((batch, nodes), -1),
        "retrive_next_sibling": torch.full((batch, nodes), -1),
    }


def build(parent_list, selected_index, seq_lens, topk, depth):
    nodes = len(selected_index[0]) + 1
    out = tree_outputs(len(seq_lens), nodes)
    kernel.build_tree_kernel_efficient_cpu(
        torch.tensor(parent_list),
        torch.tensor(selected_index),
        torch.tensor(seq_lens),
        *out.values(),
        topk,
        depth,
        nodes,
        1,
    )
    return out


def test_a_chain_is_a_tree_of_one_branch():
    out = build([[-1, 0, 1]], [[0, 1, 2]], [7], topk=1, depth=3)
    assert torch.equal(out["tree_mask"].view(4, 4), torch.ones(4, 4).tril().bool())
    assert out["positions"].tolist() == [7, 8, 9, 10]
    assert out["retrive_next_token"].tolist() == [[1, 2, 3, -1]]
    assert out["retrive_next_sibling"].tolist() == [[-1] * 4]


def test_a_tree_of_two_branches():
    """topk 2, depth 2: candidates 0 and 1 follow the bonus token; 2, 3 follow candidate 1 (the better one),
    4, 5 follow candidate 0. Kept are 0, 1, 3 and 4: nodes 1, 2, 3 and 4."""
    out = build([[-1, 1, 0]], [[0, 1, 3, 4]], [10], topk=2, depth=2)
    assert out["tree_mask"].view(5, 5).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert out["positions"].tolist() == [10, 11, 11, 12, 12]
    assert out["retrive_next_token"].tolist() == [[1, 4, 3, -1, -1]]
    assert out["retrive_next_sibling"].tolist() == [[-1, 2, -1, -1, -1]]


def test_one_step_has_no_parents_to_look_up():
    out = build([[]], [[0, 2]], [3], topk=3, depth=1)
    assert out["retrive_next_token"].tolist() == [[1, -1, -1]]
    assert out["retrive_next_sibling"].tolist() == [[-1, 2, -1]]
    assert out["positions"].tolist() == [3, 4, 4]


def test_a_draft_kept_without_its_parent_is_out_of_reach():
    """A tie of scores can keep candidate 2, a child of 1, and not candidate 1."""
    out = build([[-1, 1, 0]], [[0, 2]], [10], topk=2, depth=2)
    assert out["retrive_next_token"].tolist() == [[1, -1, -1]]
    assert out["retrive_next_sibling"].tolist() == [[-1] * 3]
    assert out["tree_mask"].view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def test_other_mask_layouts_are_refused():
    with pytest.raises(NotImplementedError, match="tree mask mode 0"):
        kernel.build_tree_kernel_efficient_cpu(
            torch.tensor([[]]), torch.tensor([[0]]), torch.tensor([3]), *tree_outputs(1, 2).values(), 1, 1, 2, 0
        )


def draft(topk, depth, nodes):
    """Draft one tree as EAGLE does, with random scores: its parent list, its kept candidates, and the truth about
    it, the parent node of each node."""
    parent_of, parents, score = {}, [-1], {-1: 1.0}
    frontier = [-1]
    for _ in range(depth):
        born = []
        for expanded in frontier:
            for _ in range(topk):
                candidate = len(parent_of)
                parent_of[candidate] = expanded
                score[candidate] = score[expanded] * float(torch.rand(()) * 0.9)
                born.append(candidate)
        frontier = sorted(born, key=score.get, reverse=True)[:topk]
        parents += frontier
    kept = sorted(sorted(parent_of, key=score.get, reverse=True)[: nodes - 1])
    node = {-1: 0} | {candidate: i for i, candidate in enumerate(kept, start=1)}
    return parents[: topk * (depth - 1) + 1], kept, [None, *(node[parent_of[candidate]] for candidate in kept)]


def path_to(node, parents):
    return [] if node is None else [*path_to(parents[node], parents), node]


tree_shapes = pytest.mark.parametrize(("topk", "depth", "nodes"), [(1, 3, 4), (2, 3, 7), (4, 3, 8), (4, 5, 24)])


@tree_shapes
def test_random_trees_are_linked_as_they_were_drafted(topk, depth, nodes):
    batch, seq_lens = 3, [5, 12, 1]
    parent_lists, kept, truth = zip(*(draft(topk, depth, nodes) for _ in range(batch)), strict=True)
    out = build(parent_lists, kept, seq_lens, topk, depth)
    assert out["retrive_index"].flatten().tolist() == list(range(batch * nodes))
    masks, positions = out["tree_mask"].view(batch, nodes, nodes), out["positions"].view(batch, nodes)
    for i, parents in enumerate(truth):
        for node in range(nodes):
            path = path_to(node, parents)
            assert masks[i, node].nonzero().flatten().tolist() == sorted(path)
            assert positions[i, node] == seq_lens[i] + len(path) - 1
            children = [child for child in range(nodes) if parents[child] == node]
            linked = [out["retrive_next_token"][i, node].item()]
            while linked[-1] >= 0:
                linked.append(out["retrive_next_sibling"][i, linked[-1]].item())
            assert linked == [*children, -1]


@tree_shapes
@pytest.mark.parametrize("shorter", [0, 1])
def test_the_longest_path_that_the_target_agrees_with_is_accepted(topk, depth, nodes, shorter):
    """Few distinct tokens, so that paths of every length occur; `shorter` cuts the walk before the leaves."""
    batch, limit, seen = 64, depth + 1 - shorter, set()
    parent_lists, kept, truth = zip(*(draft(topk, depth, nodes) for _ in range(batch)), strict=True)
    links = build(parent_lists, kept, [9] * batch, topk, depth)
    tokens = torch.stack([siblings_apart(parents) for parents in truth])
    wanted = torch.randint(0, topk + 1, (batch, nodes))
    predicts = torch.full((batch * nodes,), -3, dtype=torch.int32)
    accept_index = torch.full((batch, limit), -1, dtype=torch.int32)
    accept_token_num = torch.full((batch,), -3, dtype=torch.int32)
    kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
        candidates=tokens,
        retrive_index=links["retrive_index"],
        retrive_next_token=links["retrive_next_token"],
        retrive_next_sibling=links["retrive_next_sibling"],
        target_predict=wanted,
    )
    for i, parents in enumerate(truth):
        paths = [path_to(node, parents)[:limit] for node in range(nodes)]
        agreed = [p for p in paths if all(tokens[i, b] == wanted[i, a] for a, b in pairwise(p))]
        best = max(agreed, key=len)
        seen.add(len(best))
        assert accept_token_num[i] == len(best) - 1
        assert accept_index[i].tolist() == [i * nodes + node for node in best] + [-1] * (limit - len(best))
        expected = [wanted[i, node].item() if node in best else -3 for node in range(nodes)]
        assert predicts[i * nodes : (i + 1) * nodes].tolist() == expected
    assert seen >= {1, 2}, "the trees of this seed exercise no acceptance"


def siblings_apart(parents):
    """A token for each node: the siblings are 0, 1, 2, ... in random order."""
    tokens = torch.zeros(len(parents), dtype=torch.int64)
    for parent in range(len(parents)):
        children = [child for child in range(len(parents)) if parents[child] == parent]
        tokens[children] = torch.randperm(len(children))
    return tokens


def test_the_bonus_token_is_the_last_accepted_one():
    bonus = torch.zeros(3, dtype=torch.int32)
    accepted = torch.arange(10, 22, dtype=torch.int32)
    kernel.fill_bonus_tokens_cpu(accepted, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [10, 17, 19]


# --- the interpreter


def python(code, *folders, **options):
    path = os.pathsep.join(str(folder) for folder in (SGLANG_CPU, *folders))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_an_interpreter_starts_without_torch():
    assert python("import sys; print('torch' in sys.modules)").stdout.strip() == "False"


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_and_the_operators_can_be_imported():
    code = """
import torchvision, sgl_kernel, torch
print(torch.ops.torchvision.nms, sgl_kernel.__file__, hasattr(torch.ops.sgl_kernel, "convert_weight_packed"))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torchvision.nms", str(SGLANG_CPU / "sgl_kernel" / "__init__.py"), "False"]


def test_a_torchvision_that_fits_is_left_alone(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension, _meta_registrations")
    (package / "extension.py").write_text("def _has_ops(): return True")
    (package / "_meta_registrations.py").write_text("")
    done = python("import torchvision, sys; print('torch' in sys.modules)", tmp_path)
    assert done.stdout.strip() == "False", done.stderr


def test_a_sitecustomize_further_down_the_path_still_runs(tmp_path):
    """Also when this folder is there twice, under two names: it does not run itself for ever."""
    (tmp_path / "again").symlink_to(SGLANG_CPU)
    (tmp_path / "sitecustomize.py").write_text("print('also here')")
    done = python("", tmp_path / "again", tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("also here", "")


def test_two_checkouts_on_the_path_declare_the_operators_once(tmp_path):
    shutil.copy(SGLANG_CPU / "sitecustomize.py", tmp_path)
    done = python("import sys; print(str(sys.meta_path).count('TorchvisionOperators'))", tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
