"""The tree of draft tokens: built for the target to verify, then walked along the target's own choices.

A request's tree has `draft_token_num` nodes: node 0 is the bonus token, which the target itself chose last; the
others are drafts. It is stored as first child and next sibling of each node, -1 for none, so that greedy
verification is one walk. SGLang spells these names "retrive".
"""

import torch

QLEN_ONLY = 1  # sglang's TreeMaskMode: a [nodes, nodes] mask per request, the prefix left out


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Link the drafts that were kept into a tree.

    The draft scored `topk` children for the bonus token, then, at each later step, `topk` children for each of the
    `topk` best candidates so far. Numbered in that order, candidate c is a child of expansion `c // topk`:
    expansion 0 is the bonus token, and expansion e is candidate `parent_list[request, e]`.

        parent_list           [batch, topk * (depth - 1) + 1] int64; not read where all are children of the bonus
        selected_index        [batch, draft_token_num - 1] int64, the candidates kept, ascending: nodes 1, 2, ...
        verified_seq_len      [batch] int64, the tokens before the bonus token

    Written in place, the two links over a fill of -1:

        tree_mask             [batch * draft_token_num ** 2] bool, row a true at a, at its ancestors and at node 0
        positions             [batch * draft_token_num] int64, position in the sequence
        retrive_index         [batch, draft_token_num] int64, number of the node in the whole batch
        retrive_next_token    [batch, draft_token_num] int64, first child: the one kept earliest
        retrive_next_sibling  [batch, draft_token_num] int64, next child of the same parent
    """
    if tree_mask_mode != QLEN_ONLY:
        raise NotImplementedError(
            f"sgl_kernel (CPU stand-in): tree mask mode {tree_mask_mode}; SGLang uses {QLEN_ONLY} (QLEN_ONLY) on a CPU."
        )
    batch = len(verified_seq_len)
    retrive_index.copy_(torch.arange(batch * draft_token_num).view(batch, draft_token_num))
    masks = tree_mask.view(batch, draft_token_num, draft_token_num)
    positions = positions.view(batch, draft_token_num)
    for request, (candidates, expanded) in enumerate(zip(selected_index.tolist(), parent_list.tolist(), strict=True)):
        node_of = {candidate: node for node, candidate in enumerate(candidates, start=1)}
        parents = [0 if c < topk else node_of.get(expanded[c // topk]) for c in candidates]
        # A parent is numbered before its children, so its own depth and row are complete when they are copied.
        depths = [0]
        visible = [[True] + [False] * (draft_token_num - 1)]
        for node, parent in enumerate(parents, start=1):
            depths.append(depths[parent or 0] + 1)
            visible.append(visible[parent or 0].copy())
            visible[node][node] = True
        first_child, next_sibling = [-1] * draft_token_num, [-1] * draft_token_num
        for node, parent in reversed(list(enumerate(parents, start=1))):
            # Among candidates of equal score a child can be kept without its parent: it is then out of reach.
            if parent is not None:
                next_sibling[node] = first_child[parent]
                first_child[parent] = node
        masks[request] = torch.tensor(visible)
        positions[request] = verified_seq_len[request] + torch.tensor(depths)
        retrive_next_token[request] = torch.tensor(first_child)
        retrive_next_sibling[request] = torch.tensor(next_sibling)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Accept the path of drafts that the target would have chosen itself.

        candidates            [batch, nodes] int64, the token of each node
        retrive_index, retrive_next_token, retrive_next_sibling
                              [batch, nodes] int64, as `build_tree_kernel_efficient_cpu` wrote them
        target_predict        [batch, nodes] int64, the target's best token after each node

    Written in place:

        accept_index          [batch, depth + 1] int32, the accepted nodes from node 0 on, numbered in the batch,
                              over a fill of -1
        accept_token_num      [batch] int32, how many drafts were accepted, node 0 not counted
        predicts              [batch * nodes] int32, at each accepted node the token that follows it
    """
    rows = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    for request, (tokens, index, first_child, next_sibling, wanted) in enumerate(
        zip(*(row.tolist() for row in rows), strict=True)
    ):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = first_child[path[-1]]
            while node >= 0 and tokens[node] != wanted[path[-1]]:
                node = next_sibling[node]
            if node < 0:
                break
            path.append(node)
        accepted = torch.tensor([index[node] for node in path])
        accept_index[request, : len(path)] = accepted
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = torch.tensor([wanted[node] for node in path], dtype=predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request, from which the next round of drafting starts.

    `accept_tokens` [batch * accept_stride] int32 (any shape), `accept_lens` [batch] int32 with the bonus token
    counted, `bonus_tokens` [batch] int32 written in place.
    """
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1)[:, 0])
