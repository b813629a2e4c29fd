"""Settings beside the draft's numbers that this device, this target and these parameters leave open.

All flags are in SGLang 0.5.16 and in 0.5.23: `tests/tune_server/test_options.py` looks them up in the installed one, and holds
them against a list of those that were read in 0.5.16.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

from tasks.common import gpu
from tasks.common.params import Params
from tasks.common.server_plan import TENSOR_PARALLEL
from tasks.tune_server.candidates import Option

ATTENTION, GRAPHS, PREFILL_GRAPHS, BATCH, ALL_REDUCE = (
    "attention backend",
    "decode graphs",
    "prefill graphs",
    "batch limit",
    "all-reduce",
)
_CUSTOM = "--disable-custom-all-reduce"
# Small messages, which those of decoding are, wait for latency: few hops and few channels, or the protocol with flags in
# the data, may beat what NCCL picks.
_NCCL = (
    ("NCCL", ()),
    ("NCCL, ring, LL", (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL"))),
    ("NCCL, ring, LL128", (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL128"))),
    ("NCCL, tree, LL", (("NCCL_ALGO", "Tree"), ("NCCL_PROTO", "LL"))),
    ("NCCL, ring, simple", (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"))),
    ("NCCL, 2 channels", (("NCCL_MIN_NCHANNELS", "2"), ("NCCL_MAX_NCHANNELS", "2"))),
    ("NCCL, 8 channels", (("NCCL_MIN_NCHANNELS", "8"), ("NCCL_MAX_NCHANNELS", "8"))),
    ("NCCL, 16 channels and more", (("NCCL_MIN_NCHANNELS", "16"),)),
)
_MULTICAST = "NCCL_NVLS_ENABLE"


@dataclass(frozen=True)
class Device:
    """What the choice of kernels depends on.

    Attributes:
        capability: compute capability of the least of the GPUs, (9, 0) for an H200; None without an NVIDIA GPU.
        has_flashinfer: whether that package is installed.
        multicast: whether NVLink multicast was asked for in the environment.
    """

    capability: tuple[int, int] | None
    has_flashinfer: bool = False
    multicast: bool = False

    @classmethod
    def of(cls, params: Params) -> "Device":
        """This machine's, as the servers will see it."""
        if params.target.device == "cpu":
            return cls(None)
        found = [tuple(map(int, cap.split("."))) for (cap,) in gpu.query("--query-gpu=compute_cap") if "." in cap]
        environment = os.environ | params.serve.environment
        has_flashinfer = find_spec("flashinfer") is not None
        return cls(min(found, default=None), has_flashinfer, environment.get(_MULTICAST) == "1")


def open_options(
    params: Params, concurrency: int, device: Device, is_latent: bool = False
) -> tuple[list[Option], list[str]]:
    """
    Args:
        concurrency: requests at once that count.
        is_latent: whether the target has multi-head latent attention, whose backends are others.

    Returns:
        What can be tried, and a sentence for each kind of setting that is left as it is.
    """
    options, kept = [], []
    for kind, flags, found in (
        (
            ATTENTION,
            ("--attention-backend", "--prefill-attention", "--decode-attention", "--speculative-draft-attention"),
            _attention(device, is_latent),
        ),
        (
            "CUDA graphs",
            ("--cuda-graph", "--disable-cuda-graph", "--disable-decode-cuda-graph"),
            _graphs(params, device, concurrency),
        ),
        (BATCH, (), _batch_limits(params, concurrency)),
        (ALL_REDUCE, (_CUSTOM, "--enable-symm-mem", "--enable-nccl-nvls"), _all_reduce(params, device)),
    ):
        named = [word for word in params.serve.extra_args if word.startswith(flags)] if flags else []
        if kind == ALL_REDUCE:
            named += [name for name in params.serve.environment if name.startswith("NCCL_") and name != _MULTICAST]
        found = list(found)
        if named and found:
            kept.append(f"{kind}: kept as params.yaml names it ({', '.join(named)}).")
        else:
            options += found
    return options, kept


def _attention(device: Device, is_latent: bool) -> Iterator[Option]:
    """Backends that verify drafts. On a CPU there is one, which the plan names."""
    if device.capability is None or is_latent:
        return
    major = device.capability[0]
    names = ["triton"]
    if device.has_flashinfer:
        names += ["flashinfer", "trtllm_mha"] if major == 10 else ["flashinfer"]
    if major in (8, 9):
        names.append("fa3")
    for name in names:
        yield Option(name, ATTENTION, ("--attention-backend", name), chains_only=name == "trtllm_mha")
    if "fa3" in names:
        # Up to 0.5.22 SGLang captures no CUDA graph of the draft's pass over the accepted tokens with it.
        mixed = ("--attention-backend", "fa3", "--speculative-draft-attention-backend", "triton")
        yield Option("fa3, the draft on triton", ATTENTION, mixed)


def _graphs(params: Params, device: Device, concurrency: int) -> Iterator[Option]:
    if device.capability is None:
        return
    # A batch between two captured sizes is padded to the larger one; one beyond the largest is launched kernel by kernel.
    # The plan is used for all that the benchmark asks: its sizes stay captured.
    sizes, limit = sorted({1, concurrency, *params.benchmark.concurrency}), params.serve.max_running_requests
    *fewer, largest = map(str, sizes)
    listed = f"{', '.join(fewer)} and {largest}" if fewer else largest
    s = "s" * (sizes[-1] > 1)
    # SGLang captures up to max_running_requests on its own, of few requests each number.
    if len(sizes) < limit:
        yield Option(f"graphs of {listed} request{s}", GRAPHS, ("--cuda-graph-bs-decode", *map(str, sizes)))
    if sizes[-1] < limit:
        yield Option(f"graphs up to {largest} request{s}", GRAPHS, ("--cuda-graph-max-bs-decode", largest))
    yield Option("graphs without padding", GRAPHS, ("--disable-cuda-graph-padding",))
    yield Option("no prefill graphs", PREFILL_GRAPHS, ("--cuda-graph-backend-prefill", "disabled"))


def _batch_limits(params: Params, concurrency: int) -> Iterator[Option]:
    """As many as must run at once, since fewer slots are less to prepare in a step; twice those where they count themselves.

    Where fewer count than the benchmark's most, what is measured says nothing of still more slots.
    """
    least = max(concurrency, *params.benchmark.concurrency)
    limits = {least, 2 * least} if concurrency == least else {least}
    for limit in sorted(limits - {params.serve.max_running_requests}):
        yield Option(f"at most {limit} request{'s' * (limit > 1)}", BATCH, max_running_requests=limit)


def _all_reduce(params: Params, device: Device) -> Iterator[Option]:
    """Custom kernels of SGLang reduce what is small; NCCL's choices count where they are off."""
    if device.capability is None or not is_tensor_parallel(params.serve.extra_args):
        return
    for name, environment in _NCCL:
        yield Option(name, ALL_REDUCE, (_CUSTOM,), environment)
    if device.multicast:  # it may disturb GPUs that others share: nobody is switched to it who has not asked
        yield Option("NCCL with NVLS", ALL_REDUCE, (_CUSTOM, "--enable-nccl-nvls"))
        yield Option("symmetric memory", ALL_REDUCE, ("--enable-symm-mem",))


def is_tensor_parallel(extra_args: Sequence[str]) -> bool:
    """Whether the flags split each layer over several GPUs."""
    words = [part for word in extra_args for part in word.split("=", 1)]
    return any(name in TENSOR_PARALLEL and value.isdigit() and int(value) > 1 for name, value in pairwise(words))
