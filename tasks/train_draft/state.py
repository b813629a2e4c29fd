"""All that training goes on from, as one dict of whole CPU tensors, whatever the number of processes."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def training_state(draft: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """Weights, moments and random state; every process takes part, and those that do not `keep` it get no tensors."""
    device = next(draft.parameters()).device
    return {
        "draft": gathered(draft.state_dict(), keep),
        "optimizer": gathered(optimizer.state_dict(), keep),
        # Nothing is drawn from them today. That a resumed run equals an uninterrupted one must not hang on it.
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], draft: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on from a `training_state`; each process takes its shards of it."""
    parameters = dict(draft.named_parameters())
    draft.load_state_dict({name: _like(value, parameters[name]) for name, value in state["draft"].items()})
    in_order = list(parameters.values())
    moments = {
        number: {name: _like(value, in_order[number]) for name, value in of_parameter.items()}
        for number, of_parameter in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})
    torch.set_rng_state(state["rng"])
    if in_order[0].device.type == "cuda" and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"], in_order[0].device)


def gathered(value: Any, keep: bool = True) -> Any:
    """A state dict with whole tensors on the CPU, from one whose tensors may be shards; every process takes part.

    Args:
        keep: whether this process wants them; else there is None in place of each.
    """
    if isinstance(value, dict):
        return {key: gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item, keep) for item in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if keep else None
    return value


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor as this process holds `parameter`: its shard, or the same."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
