"""How fast a kind of device turns its measured matmul FLOP/s into each stage's work.

Each number's source is in infra/docs/environment.md. On the reference CPU they are fitted to stages that ran;
on GPUs they come from one small model on an H200, which large models outpace.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoding:
    """One forward step over a batch of b sequences takes

        layers x layer_s + weights read / memory speed + b x 2 x active parameters / (utilisation x F)

    which is right at both ends: a small model on a GPU is bound by launches, a large one by its weights.
    """

    layer_s: float
    utilisation: float


@dataclass(frozen=True)
class Pace:
    """Shares of F, the measured FLOP/s of a matrix product, and seconds that do not depend on it."""

    transformers: Decoding
    sglang: Decoding
    prefill: float
    training: float
    server_start_s: float


CPU = Pace(
    transformers=Decoding(layer_s=0.3e-3, utilisation=0.3),
    sglang=Decoding(layer_s=1e-3, utilisation=0.03),
    prefill=0.7,
    training=0.45,
    server_start_s=45,
)
CUDA = Pace(
    transformers=Decoding(layer_s=1e-3, utilisation=0.3),
    sglang=Decoding(layer_s=0.045e-3, utilisation=0.1),
    prefill=0.3,
    training=0.1,
    server_start_s=130,
)
# Of transformers' prefill, what a dump through SGLang reaches, writing included.
SGLANG_DUMP = 0.64
DISK_BYTES_PER_S = 300e6
NETWORK_BYTES_PER_S = 100e6
DEQUANTISED_BYTES_PER_S = 20e6
# Python and its imports, each time that a stage starts.
START_S = 6.0
