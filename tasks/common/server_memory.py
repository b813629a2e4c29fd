"""Whether several servers have room beside each other."""

from collections.abc import Sequence
from pathlib import Path

from tasks.common import gpu
from tasks.common.memory import available_memory
from tasks.common.params import Params
from tasks.common.server_plan import ServerPlan

# What a server takes beside weights and KV cache: three Python processes (1.7 GB measured on a CPU); on a GPU the CUDA
# context, captured graphs and activations.
_OVERHEAD_BYTES, _GPU_OVERHEAD_BYTES = 2e9, 6e9
# Servers may claim this much of a GPU between them; the rest is for what nobody counts.
_GPU_SHARE = 0.9


def fit_together(plans: Sequence[ServerPlan], params: Params) -> bool:
    """Whether servers of these plans fit into memory at once.

    A server claims `serve.mem_fraction_static` of a GPU, or of what is free of the host's memory on a CPU, unless
    `serve.max_total_tokens` bounds its cache.
    """
    if params.target.device == "cpu":
        free, share = available_memory(), params.serve.mem_fraction_static
        if params.serve.max_total_tokens:
            return free > sum(_memory(plan, params, _OVERHEAD_BYTES) for plan in plans)
        return free > len(plans) * (share * free + _OVERHEAD_BYTES)
    capacity = min((int(mib) for (mib,) in gpu.query("--query-gpu=memory.total") if mib.isdigit()), default=0) * 2**20
    if params.serve.max_total_tokens and capacity:
        # Each server sizes its cache from what is free when it looks, so the last one must still find its fraction.
        claimed = sum(_memory(plan, params, _GPU_OVERHEAD_BYTES) for plan in plans)
        return claimed <= min(_GPU_SHARE, params.serve.mem_fraction_static) * capacity
    return len(plans) * params.serve.mem_fraction_static <= _GPU_SHARE


def _memory(plan: ServerPlan, params: Params, overhead: float) -> float:
    """Bytes that a server with a bounded cache may come to hold, on one GPU where it spans several."""
    from tasks.common.target import TargetShape, load_config

    weights = sum(file.stat().st_size for folder in (plan.target, plan.draft) if folder for file in _weights(folder))
    shape = TargetShape.of(load_config(plan.target))
    width = 4 if plan.dtype == "float32" else 2
    token = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * width
    cache = token * params.serve.max_total_tokens
    return (weights + cache) / max(1, len(plan.gpus)) + overhead


def _weights(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
