"""Was a last state normed? RMSNorm leaves rms(last / weight) = 1, and nothing else does."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A correct RMSNorm leaves rms 1 but for its epsilon and the rounding of the stored type.
_TOLERANCE = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03}


def rms_over_norm(last: "torch.Tensor", final_norm: "torch.Tensor") -> tuple[float, bool]:
    """The rms of last / norm weight that is farthest from 1 over the tokens, and whether it is 1 within the dtype.

    Args:
        last: [T, H] as stored.
        final_norm: weight of the target's final norm, [H].
    """
    if last.shape[1] != len(final_norm):
        return math.nan, False
    used = final_norm != 0
    rms = (last.float()[:, used] / final_norm[used]).square().mean(dim=1).sqrt()
    farthest = float(rms[(rms - 1).abs().nan_to_num(math.inf).argmax()])
    return farthest, abs(farthest - 1) <= _TOLERANCE[str(last.dtype).removeprefix("torch.")]
