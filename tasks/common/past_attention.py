"""Attention from rows to the step-0 keys: those at positions up to each row, in its own sample.

Both forms give what is attended and the log-sum-exp of the scores, by which a row's own later keys are added to it
(`draft_layer.add_own`): no mask of T x T, and none that grows with the steps. They are one function of the rows:

    queries [R, heads, d], keys and values [T, kv heads, d] -> [R, heads, d] and float32 [R, heads]
"""

from collections.abc import Callable

import torch

from tasks.common.kernels import Kernel
from tasks.common.rows import BLOCK, Rows

Past = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def past_of(rows: Rows, num_tokens: int) -> Past:
    """Attention for these rows; the same for every step of a batch."""
    if rows.tiles is None:
        return lambda queries, keys, values: _BySample.apply(queries, keys, values, rows)
    mask = block_mask(rows, num_tokens)
    return lambda queries, keys, values: _flex(queries, keys, values, mask)


class _BySample(torch.autograd.Function):
    """One product of matrices a sample; scores are computed again in the backward and never stored."""

    @staticmethod
    def forward(ctx, queries, keys, values, rows: Rows):
        attended = torch.empty_like(queries)
        lse = queries.new_empty(queries.shape[:2], dtype=torch.float32)
        for first, last, start, end in rows.segments:
            q, k, v = _grouped(queries[first:last], keys), keys[start:end].transpose(0, 1), values[start:end]
            scores = _scores(q, k, rows.index[first:last], start)
            of_rows = scores.logsumexp(-1, keepdim=True)
            shares = scores.sub_(of_rows).exp_()
            attended[first:last] = _ungrouped(shares @ v.transpose(0, 1), last - first)
            lse[first:last] = _ungrouped(of_rows, last - first).squeeze(-1)
        ctx.save_for_backward(queries, keys, values, attended, lse)
        ctx.rows = rows
        return attended, lse

    @staticmethod
    def backward(ctx, d_attended, d_lse):
        queries, keys, values, attended, lse = ctx.saved_tensors
        d_queries, d_keys, d_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        # softmax: d score = share * (d share - sum(share * d share)); the log-sum-exp adds share * d lse.
        offset = d_lse - (d_attended * attended).sum(-1)
        for first, last, start, end in ctx.rows.segments:
            q, k, v = _grouped(queries[first:last], keys), keys[start:end].transpose(0, 1), values[start:end]
            d_out = _grouped(d_attended[first:last], keys)
            shares = _scores(q, k, ctx.rows.index[first:last], start)
            shares = shares.sub_(_grouped(lse[first:last, :, None], keys)).exp_()
            d_values[start:end] = (shares.transpose(1, 2) @ d_out).transpose(0, 1)
            d_scores = (d_out @ v.permute(1, 2, 0)).add_(_grouped(offset[first:last, :, None], keys)).mul_(shares)
            d_scores.mul_(queries.shape[-1] ** -0.5)
            d_queries[first:last] = _ungrouped(d_scores @ k, last - first)
            d_keys[start:end] = (d_scores.transpose(1, 2) @ q).transpose(0, 1)
        return d_queries, d_keys, d_values, None


def _grouped(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, heads, d] -> [kv heads, n * groups, d]: the heads that share keys side by side."""
    n, heads, width = rows.shape
    kv_heads = keys.shape[1]
    return rows.view(n, kv_heads, heads // kv_heads, width).transpose(0, 1).reshape(kv_heads, -1, width)


def _ungrouped(grouped: torch.Tensor, n: int) -> torch.Tensor:
    """[kv heads, n * groups, d] -> [n, heads, d]."""
    kv_heads, _, width = grouped.shape
    return grouped.view(kv_heads, n, -1, width).transpose(0, 1).reshape(n, -1, width)


def _scores(q: torch.Tensor, k: torch.Tensor, index: torch.Tensor, start: int) -> torch.Tensor:
    """[kv heads, n * groups, keys], -inf where a key lies behind its row."""
    scores = (q @ k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    future = torch.arange(start, start + k.shape[1], device=index.device) > index[:, None]
    split = scores.view(len(k), len(index), -1, k.shape[1])
    return split.masked_fill_(future[:, None], -torch.inf).view_as(scores)


def block_mask(rows: Rows, num_tokens: int):
    """The same sight as tiles and a rule within them, for flex_attention (torch >= 2.9)."""
    from torch.nn.attention.flex_attention import BlockMask

    index, starts, tiles = rows.index, rows.starts, rows.tiles

    def visible(batch, head, row, key):
        return (key <= index[row]) & (key >= starts[row])

    return BlockMask.from_kv_blocks(
        tiles.partial_count,
        tiles.partial,
        tiles.full_count,
        tiles.full,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(index), num_tokens),
    )


def flex(queries, keys, values, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of `block_mask`, by torch's flex_attention."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def headed(tensor):
        return tensor.transpose(0, 1)[None]

    # torch 2.11's own choice on an H200, 4 warps for tiles of 128 x 128, spills: 2.7 times as long at heads of 64.
    wide = queries.is_cuda and queries.element_size() == 2

    attended, aux = flex_attention(
        headed(queries),
        headed(keys),
        headed(values),
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={"fwd_num_warps": 8} if wide else None,
    )
    return attended[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


_flex = Kernel(flex)
