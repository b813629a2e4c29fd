"""infra/sglang_cpu: the operators on cache slots against a slow and obvious reading of what SGLang asks of them."""

import pytest
import torch

from tests.infra.stand_in import kernel


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
