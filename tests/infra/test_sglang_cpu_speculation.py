"""infra/sglang_cpu: draft trees and their verification against a slow and obvious reading of what SGLang asks of them."""

from itertools import pairwise

import pytest
import torch

from tests.infra.stand_in import kernel


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
