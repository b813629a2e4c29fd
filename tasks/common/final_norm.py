"""Was a last state normed? RMSNorm leaves rms(last / weight) = 1, and nothing else does."""

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# A correct RMSNorm leaves rms 1 but for its epsilon and the rounding of the stored type.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03, "float8": 0.05}


def token_rms(last: "torch.Tensor", final_norm: "torch.Tensor") -> "torch.Tensor":
    """The rms of last / norm weight, float32 [T]; NaN where the widths differ.

    Args:
        last: [T, H].
        final_norm: weight of the target's final norm, [H].
    """
    if last.shape[1] != len(final_norm):
        return last.new_full((len(last),), math.nan).float()
    last, used = last.float(), final_norm != 0
    if not used.all():  # picking columns costs more than all the rest
        last, final_norm = last[:, used], final_norm[used]
    return (last / final_norm).square().mean(dim=1).sqrt()


def farthest_from_one(rms: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of each sample, which starts at its entry of `starts`, the rms that is farthest from 1; infinite for NaN."""
    rms = np.nan_to_num(rms, nan=np.inf)
    above, away = np.maximum.reduceat(rms, starts), np.maximum.reduceat(np.abs(rms - 1), starts)
    return np.where(above - 1 == away, above, 1 - away)


def rms_over_norm(last: "torch.Tensor", final_norm: "torch.Tensor", storage_dtype: str) -> tuple[float, bool]:
    """The rms that is farthest from 1 over the tokens of `last` [T, H], and whether it is 1 within the stored type."""
    farthest = float(farthest_from_one(token_rms(last, final_norm).numpy(), np.zeros(1, np.int64))[0])
    return farthest, abs(farthest - 1) <= TOLERANCE[storage_dtype]
