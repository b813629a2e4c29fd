"""Attention to the step-0 keys, and the tiles that a GPU looks into, against explicit masks."""

import numpy as np
import pytest
import torch

from tasks.common import kernels, past_attention
from tasks.common.past_attention import past_of
from tasks.common.rows import BLOCK, Rows, Tiles
from tests.reference import on_the_path_of_a_gpu

BOUNDS = ((0, 90), (90, 93), (93, 410), (410, 700), (700, 768))


def rows_of(share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(BOUNDS[-1][1], generator=generator) < share
    wanted[600:] = False  # a sample that ends without rows, and one that has none
    return wanted.nonzero().squeeze(1)


def visible(rows: Rows, num_tokens: int) -> torch.Tensor:
    """Written out: the keys of the same sample up to the row, bool [R, T]."""
    sample = torch.cat([torch.full((end - start,), n) for n, (start, end) in enumerate(BOUNDS)])
    keys = torch.arange(num_tokens)
    return (sample[rows.index][:, None] == sample) & (keys <= rows.index[:, None])


def explicit(queries, keys, values, mask):
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("rhd,thd->rht", queries, keys) * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("rht,thd->rhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("path", ["by sample", "tiles"])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_attention_and_its_log_sum_equal_explicit_masks_in_values_and_gradients(share, path, monkeypatch):
    if path == "tiles":
        on_the_path_of_a_gpu(monkeypatch)
    torch.manual_seed(0)
    num_tokens = BOUNDS[-1][1]
    rows = Rows.of(rows_of(share, 1), BOUNDS, "cpu")
    inputs = [
        torch.randn(n, heads, 8, dtype=torch.float64, requires_grad=True)
        for n, heads in ((len(rows.index), 4), (num_tokens, 2), (num_tokens, 2))
    ]
    found = past_of(rows, num_tokens)(*inputs)
    expected = explicit(*inputs, visible(rows, num_tokens))
    weights = [torch.randn_like(tensor)[: rows.count] for tensor in expected]
    gradients = []
    for outputs in (found, expected):
        total = sum((weight * out[: rows.count]).sum() for weight, out in zip(weights, outputs, strict=True))
        gradients.append(torch.autograd.grad(total, inputs))
    for tensor, wanted in zip(found, expected, strict=True):  # the log-sum is kept in float32
        torch.testing.assert_close(tensor[: rows.count].double(), wanted[: rows.count], rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_hold_every_visible_pair_and_full_ones_no_other(share, seed, monkeypatch):
    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    rows = Rows.of(rows_of(share, seed), BOUNDS, "cpu")
    seen = visible(rows, 768).view(len(rows.index) // BLOCK, BLOCK, 768 // BLOCK, BLOCK)
    some, all_of_them = seen.any(3).any(1), seen.all(3).all(1)
    partial, full = listed(rows.tiles.partial_count, rows.tiles.partial), listed(rows.tiles.full_count, rows.tiles.full)
    assert not (partial & full).any()
    assert torch.equal(full, all_of_them)
    assert not (some & ~(partial | full)).any()


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros_like(indices[0, 0], dtype=torch.bool)
    for line, (count, of_line) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
        chosen[line, of_line[:count].long()] = True
    return chosen


def test_a_long_answer_of_its_own_is_seen_in_full_tiles():
    tiles = Tiles.of(np.arange(512), np.zeros(512, dtype=np.int64), 512)
    assert tiles.full_count.flatten().tolist() == [0, 1, 2, 3]
    assert tiles.partial_count.flatten().tolist() == [1, 1, 1, 1]


def test_numbers_of_rows_are_few_where_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    bounds = ((0, 4096),)
    sizes = {len(Rows.of(torch.arange(count), bounds, "cpu").index) for count in range(0, 4097, 7)}
    assert sizes == {512 * n for n in range(1, 9)}


def test_by_sample_attends_from_no_rows_to_nothing():
    rows = Rows.of(torch.empty(0, dtype=torch.int64), BOUNDS, "cpu")
    attended, lse = past_attention.past_of(rows, 768)(
        torch.empty(0, 4, 8), torch.ones(768, 2, 8), torch.ones(768, 2, 8)
    )
    assert attended.shape == (0, 4, 8) and lse.shape == (0, 4)
