"""Where on the token axis a draft is run, and which step-0 keys each place sees; made on the CPU, small integers only."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tasks.common.kernels import compiles_on

# Positions of a tile of flex_attention.
BLOCK = 128
# Numbers of rows that are told apart where kernels are compiled: eighths of the token axis.
_ROW_SIZES = 8


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Tiles:
    """Which tiles of queries and keys hold a visible pair: int32, [1, 1, R / BLOCK] and [1, 1, R / BLOCK, T / BLOCK].

    Attributes:
        partial_count, partial: how many tiles of keys a tile of queries must look into pair by pair, and those first.
        full_count, full: the same of tiles in which every pair is visible.
    """

    partial_count: torch.Tensor
    partial: torch.Tensor
    full_count: torch.Tensor
    full: torch.Tensor

    @classmethod
    def of(cls, index: np.ndarray, starts: np.ndarray, num_tokens: int) -> "Tiles":
        """For rows that see the keys from `starts` up to `index`, both ascending."""
        tiles, keys = -(-len(index) // BLOCK), np.arange(-(-num_tokens // BLOCK))
        first = np.arange(tiles) * BLOCK
        last = np.minimum(first + BLOCK, len(index)) - 1
        seen = (keys >= starts[first][:, None] // BLOCK) & (keys <= index[last][:, None] // BLOCK)
        # All of its keys are seen by all of its queries: one sample, from its start to the first query.
        whole = (keys * BLOCK >= starts[last][:, None]) & ((keys + 1) * BLOCK - 1 <= index[first][:, None])
        return cls(*_listed(seen & ~whole), *_listed(seen & whole))


def _listed(chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of the true entries of each line, the true ones first."""
    order = np.argsort(~chosen, axis=1, kind="stable")
    counts, order = chosen.sum(1, dtype=np.int32)[None, None], order.astype(np.int32)[None, None]
    return torch.from_numpy(counts), torch.from_numpy(order)


@dataclass(frozen=True)
class Rows:
    """R places at which every step of a chain is run.

    Attributes:
        count: of them that are wanted; those behind repeat a place to keep R one of a few numbers.
        index: ascending positions on the token axis, int64 [R].
        starts: where the sample of each begins, int64 [R].
        segments: for each sample with rows: their range in `index`, and the range of positions up to the last of them.
        tiles: for kernels that are compiled; None where none is.
    """

    count: int
    index: torch.Tensor
    starts: torch.Tensor
    segments: tuple[tuple[int, int, int, int], ...]
    tiles: Tiles | None

    @classmethod
    def of(cls, index: torch.Tensor, bounds: tuple[tuple[int, int], ...], device: torch.device | str) -> "Rows":
        """Rows on the CPU, in the form that `device` computes.

        Args:
            index: ascending positions on the token axis, int64 [n].
            bounds: [start, end) of each sample; together the whole token axis.
        """
        num_tokens, count = bounds[-1][1], len(index)
        places, begins = index.cpu().numpy(), np.array([start for start, _ in bounds])
        if compiles_on(device):
            size = round_up(-(-num_tokens // _ROW_SIZES), BLOCK)
            padding = np.full(max(size, round_up(count, size)) - count, num_tokens - 1)
            places = np.concatenate([places, padding])
        starts = begins[np.searchsorted(begins, places, side="right") - 1]
        edges = np.searchsorted(places[:count], [*begins, num_tokens]).tolist()
        segments = tuple(
            (first, last, start, int(places[last - 1]) + 1)
            for (start, _), first, last in zip(bounds, edges[:-1], edges[1:], strict=True)
            if last > first
        )
        tiles = Tiles.of(places, starts, num_tokens) if compiles_on(device) else None
        return cls(count, torch.from_numpy(places), torch.from_numpy(starts), segments, tiles)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Rows":
        """`function` of every tensor: to a device, into pinned memory."""
        tiles = self.tiles and Tiles(*(function(tensor) for tensor in vars(self.tiles).values()))
        return replace(self, index=function(self.index), starts=function(self.starts), tiles=tiles)
