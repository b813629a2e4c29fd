"""The server that states are dumped from: the target as it will be served, with hooks on what the contract names."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.server_plan import ServerPlan, baseline_plan, flag, refuse_flags

_ROOT = Path(__file__).resolve().parents[2]
_HOOKS = "tasks.dump_hidden_states.hooks"
# A request ends with its first token, so many fit: enough for several chunks of prefill to wait.
_RUNNING_REQUESTS = 256
# With these a pass is cut, mixed or spread so that a hook does not see the rows of whole requests in order.
_REFUSED = {
    "--dp": "run several ranks under torchrun instead: each starts a server of its own and writes other shards",
    "--dp-size": "run several ranks under torchrun instead: each starts a server of its own and writes other shards",
    "--data-parallel-size": "run several ranks under torchrun instead: each starts a server of its own",
    "--enable-dp-attention": "the rows of a request are spread over ranks",
    "--pp-size": "no rank sees all layers",
    "--pipeline-parallel-size": "no rank sees all layers",
    "--enable-mixed-chunk": "rows of decoding requests stand between those of prefill",
    "--enable-two-batch-overlap": "two halves of a batch run through the hooks at once",
    "--enable-single-batch-overlap": "parts of a layer run beside each other",
    "--enable-pdmux": "prefill is split by layers",
    "--disaggregation-mode": "prefill and decode run in servers of their own",
    "--nnodes": "hooks and dump share the files of one host; run a rank on each host instead",
    "--attn-cp-size": "the rows of a request are spread over ranks",
    "--attention-context-parallel-size": "the rows of a request are spread over ranks",
    "--moe-dp-size": "the rows of a request are spread over ranks",
    "--moe-data-parallel-size": "the rows of a request are spread over ranks",
    "--allow-auto-truncate": "a sample that is too long would lose its end",
    "--config": "what that file sets cannot be checked",
    "--forward-hooks": "the hooks are the dump's own",
    "--cuda-graph-backend-prefill": "hooks do not run where a graph is replayed",
}


def states_plan(params: Params, contract: Contract, spool: Path) -> ServerPlan:
    """The plan of the server; kernels, quantisation and parallelism are those of `serve`.

    Args:
        spool: where its hooks find which shard a request belongs to.

    Raises:
        DraftlineError: `serve.extra_args` holds what hooks cannot work with; says why.
    """
    refuse_flags(params, {name: f"with which states cannot be dumped: {reason}." for name, reason in _REFUSED.items()})
    if re.search(r"--load-f\S*[= ]dummy\b", " ".join(params.serve.extra_args)):
        raise DraftlineError(
            f"{PARAMS}: serve.extra_args holds --load-format dummy: states of random weights are nobody's."
        )
    serve = params.serve.model_copy(update={"max_running_requests": _RUNNING_REQUESTS})
    plan = baseline_plan(params.model_copy(update={"serve": serve}))
    hooked = (
        flag("--forward-hooks", json.dumps(_hooks(params, contract, spool)), reason="aux layers and last state"),
        flag("--disable-radix-cache", reason="tokens found in the prefix cache are not computed"),
        flag("--cuda-graph-backend-prefill", "disabled", reason="hooks do not run where a graph is replayed"),
        flag("--cuda-graph-backend-decode", "disabled", reason="nothing is decoded: capturing graphs only takes time"),
    )
    root = flag("PYTHONPATH", str(_ROOT), reason="the hooks are imported from here")
    return replace(plan, kind="states", flags=(*plan.flags, *hooked), environment=(root, *plan.environment))


def require_hooks(info: dict[str, Any], expected: int) -> None:
    """The server says itself that it runs with the hooks and without what keeps them from running.

    Raises:
        DraftlineError: names each flag that the server resolved otherwise.
    """
    found = {
        "disable_radix_cache": info.get("disable_radix_cache"),
        "cuda_graph_backend_prefill": info.get("cuda_graph_backend_prefill"),
        "forward_hooks": len(info.get("forward_hooks") or ()),
    }
    wanted = {"disable_radix_cache": True, "cuda_graph_backend_prefill": "disabled", "forward_hooks": expected}
    wrong = [f"{name} is {found[name]}, planned {value}" for name, value in wanted.items() if found[name] != value]
    if wrong:
        raise DraftlineError(f"/server_info of the states server disagrees with its plan: {'; '.join(wrong)}.")


def require_fits(info: dict[str, Any], tokens: int, sample: str) -> None:
    """The running server takes a sample of so many tokens: fewer than its context and cache have, by how much is its own.

    Args:
        info: /server_info.

    Raises:
        DraftlineError: it does not; names the sample.
    """
    if tokens >= info["max_req_input_len"]:
        raise DraftlineError(
            f"{PARAMS}: sample {sample} has {tokens} tokens; a server of serve.context_length {info['context_length']} with "
            f"{info['max_total_num_tokens']} tokens of cache takes {info['max_req_input_len'] - 1}. Raise serve.context_length, "
            f"serve.max_total_tokens or serve.mem_fraction_static, whichever is short."
        )


def _hooks(params: Params, contract: Contract, spool: Path) -> list[dict[str, Any]]:
    """One hook a slot, and one on the decoder, whose output is what the head reads."""
    config = {
        "spool": str(spool),
        "num_aux": len(contract.aux_layer_ids),
        "hidden_size": contract.hidden_size,
        "storage_dtype": params.dump.storage_dtype,
    }
    layers = [
        {
            "name": f"slot {slot}, layer {layer}",
            "target_modules": [f"model.layers.{layer}", f"language_model.model.layers.{layer}"],
            "hook_factory": f"{_HOOKS}:layer_hook",
            "config": {**config, "slot": slot},
        }
        for slot, layer in enumerate(contract.aux_layer_ids)
    ]
    decoder = {
        "name": "last state",
        "target_modules": ["model", "language_model.model"],
        "hook_factory": f"{_HOOKS}:last_hook",
        "config": config,
    }
    return [*layers, decoder]
