"""How the norms of a run's tokens are distributed, slot by slot, in constant memory."""

from threading import Lock

import numpy as np

# The upper half of a float32 is a bfloat16: 0.8 % wide, in order, and below infinity there are so many.
_FINITE = 0x7F80
_MIDDLES = ((np.arange(_FINITE, dtype=np.uint32) << 16) | 0x8000).view(np.float32).astype(np.float64)


class TokenNorms:
    """Counts the norms of tokens, each slot by itself; threads may add at once, and their order changes nothing."""

    def __init__(self, slots: int):
        self.slots = slots
        self._counts = np.zeros((slots, _FINITE), np.int64)
        self._lock = Lock()

    def add(self, norms: np.ndarray) -> None:
        """Count float32 [tokens, slots]; a norm that is NaN or infinite is left out."""
        halves = np.ascontiguousarray(norms.T).view(np.uint32) >> 16
        counts = [np.bincount(slot, minlength=_FINITE)[:_FINITE] for slot in halves]
        with self._lock:
            for total, count in zip(self._counts, counts, strict=True):
                total += count

    def median(self, slot: int) -> float:
        """Over all tokens; NaN where there are none."""
        return _weighted_median(_MIDDLES, self._counts[slot])

    def deviation(self, slot: int) -> float:
        """Robust standard deviation of the logarithm: 1.4826 times the median distance from the median."""
        distances = np.abs(np.log(_MIDDLES / self.median(slot)))
        order = np.argsort(distances)
        return 1.4826 * _weighted_median(distances[order], self._counts[slot][order])


def _weighted_median(ascending: np.ndarray, counts: np.ndarray) -> float:
    below = np.cumsum(counts)
    return float(ascending[np.searchsorted(below, below[-1] / 2)]) if below[-1] else float("nan")
