"""Which slot of the KV cache holds which token.

`req_to_token` [requests, pool_len] int32 is SGLang's table: row r lists the slots of request r by position.
`req_pool_indices` [batch] picks the rows of a batch; offsets and lengths are [batch] too, each int32 or int64.
Outputs are written in place unless a function returns one.
"""

import ctypes

import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Enter newly allocated slots into the table.

    Positions `start_offset[i]` up to `end_offset[i]` of request i receive the next
    `end_offset[i] - start_offset[i]` entries of `out_cache_loc` (int64), request after request.
    """
    for positions, packed in _packed_rows(req_pool_indices, req_to_token, start_offset, end_offset):
        positions.copy_(out_cache_loc[packed])


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Read slots back: the reverse of `assign_req_to_token_pool_cpu`.

    `out_cache_loc` (int64) receives the slots of positions `start_offset[i]` up to `end_offset[i]`, request after
    request; it may be longer than that, and what follows keeps its content.
    """
    for positions, packed in _packed_rows(req_pool_indices, req_to_token, start_offset, end_offset):
        out_cache_loc[packed] = positions


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The slots that the draft writes: the `topk * num_steps` positions after each request's `seq_lens[i]`.

    `out_cache_loc` [batch * topk * num_steps] int64: for each request, the steps of its first branch, then of its
    second, and so on.
    """
    width = topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + width, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A slot table for the draft in which each branch of the tree is a request of its own.

    Returns [batch * topk, pool_len] int32. Row `i * topk + branch` lists the `seq_lens[i]` slots that the branches
    of request i share, then the `num_steps` slots of that branch; what follows is not defined.
    """
    table = req_to_token.new_empty(len(req_pool_indices) * topk, pool_len)
    branches = iter(table)
    for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        slots = req_to_token[row]
        for own in slots[length : length + topk * num_steps].view(topk, num_steps):
            branch = next(branches)
            branch[:length] = slots[:length]
            branch[length : length + num_steps] = own
    return table


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The slots of the accepted tokens, in order and without gaps.

    `accept_index` (any shape, -1 for none) indexes `out_cache_loc` (int64); the result goes to the front of
    `accept_out_cache_loc` (int64), and what follows keeps its content.
    """
    accepted = out_cache_loc[accept_index[accept_index >= 0]]
    accept_out_cache_loc[: len(accepted)] = accepted


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move tokens to other slots, in the key and value buffer of every layer at once.

    `data_ptrs` [buffers] uint64 are the addresses of the buffers and `strides` [buffers] int64 the bytes of a slot.
    Slot `src_loc[i]` is copied to slot `tgt_loc[i]` (int64), as if all were read before any is written: the
    accepted path of a tree moves to the front of its own slots.
    """
    moves = tgt_loc != src_loc
    if not moves.any():
        return
    targets, sources = tgt_loc[moves], src_loc[moves]
    slots = 1 + int(max(targets.max(), sources.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        buffer[targets] = buffer[sources]


def _packed_rows(req_pool_indices, req_to_token, start_offset, end_offset):
    """For each request: its part of the table, as a view, and its part of a packed vector, as a slice."""
    packed = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        yield req_to_token[row, start:end], slice(packed, packed + end - start)
        packed += end - start
