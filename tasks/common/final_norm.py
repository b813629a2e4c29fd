"""Was a last state normed? RMSNorm leaves rms(last / weight) = 1, and nothing else does."""

import math
from typing import TYPE_CHECKING

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
    used = final_norm != 0
    return (last.float()[:, used] / final_norm[used]).square().mean(dim=1).sqrt()


def rms_over_norm(last: "torch.Tensor", final_norm: "torch.Tensor", storage_dtype: str) -> tuple[float, bool]:
    """The rms that is farthest from 1 over the tokens of `last` [T, H], and whether it is 1 within the stored type."""
    rms = token_rms(last, final_norm)
    farthest = float(rms[(rms - 1).abs().nan_to_num(math.inf).argmax()])
    return farthest, abs(farthest - 1) <= TOLERANCE[storage_dtype]
