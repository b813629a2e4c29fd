"""Whether the servers run under the same conditions: a speed-up over a baseline with other flags is none (S6).

What counts is not what was asked for but what each server says that it runs with: SGLang resolves, lowers and replaces
settings on its own, and differently once it speculates.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tasks.common.errors import DraftlineError
from tasks.common.server_plan import Setting
from tasks.common.traffic import Load

# What makes a server this one and no other, and what speculation is; all else must be equal.
_OWN = (
    "port", "random_seed", "weight_version", "nccl_port", "dist_init_addr", "launch_command", "startup_time", "internal_states"
)  # fmt: skip
_SPECULATION = "speculative_"
# Lists of sizes for which graphs are captured: SGLang spaces them by the tokens of a round. Whether there are graphs, by
# which backend and up to which size stays compared.
_SIZES = ("bs", "cuda_graph_bs")
# Tokens of the KV cache: the draft's own layer takes some room. What must be equal is that nobody has to wait.
_POOL = "max_total_num_tokens"
# What SGLang (0.5.16 to 0.5.23) takes from a server that speculates on a CPU, as (plain, speculating): the plain one keeps it, since
# without a draft people would have it. The other way round, or on a GPU, it is a difference like any.
_GIVEN_UP = {"disable_overlap_schedule": (False, True)}
# Of a server's settings, what a reader of the report wants to see.
_SHOWN = (
    "attention_backend", "decode_attention_backend", "prefill_attention_backend", "sampling_backend", "disable_cuda_graph",
    "disable_radix_cache", "max_running_requests", "chunked_prefill_size", "kv_cache_dtype",
    "quantization", "tp_size", "mem_fraction_static", "page_size",
)  # fmt: skip


def shown(infos: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings that all servers share, for the report, and the one in which they may differ.

    Args:
        infos: /server_info by arm, the plain server's first.
    """
    plain, *others = infos.values()
    settings = {name: plain[name] for name in _SHOWN if name in plain}
    for name in _GIVEN_UP:
        if any(info.get(name) != plain.get(name) for info in others):
            settings[name.removeprefix("disable_")] = "on the plain server alone: with a draft SGLang has none on a CPU"
    return settings


def require_equal_environments(environments: dict[str, tuple[Setting, ...]]) -> None:
    """What a server does not say of itself: variables such as OMP_NUM_THREADS slow it down unseen.

    Args:
        environments: of the plans by arm, the plain server's first.

    Raises:
        DraftlineError: one differs.
    """
    (plain, reference), *others = ((name, {s.name: s.values for s in found}) for name, found in environments.items())
    for name, environment in others:
        if differing := [
            variable for variable in reference | environment if reference.get(variable) != environment.get(variable)
        ]:
            raise DraftlineError(
                f"the {name} server does not run under the same conditions as the {plain} server: {', '.join(differing)} of the "
                f"environment differ. serve.environment goes to both."
            )


def require_equal_conditions(infos: dict[str, dict[str, Any]], loads: Sequence[Load], reserved: int) -> None:
    """
    Args:
        infos: /server_info by arm, the plain server's first.
        reserved: tokens of a round beside a request's own.

    Raises:
        DraftlineError: a setting differs between the plain server and another, or a cache is too small for the load.
    """
    (plain, reference), *others = infos.items()
    for name, info in others:
        differing = list(_differences(reference, info))
        if differing:
            raise DraftlineError(
                f"the {name} server does not run under the same conditions as the {plain} server, so that a ratio of their "
                f"speeds would say nothing of the draft: {'; '.join(differing)}. Give both the same flags (serve.extra_args goes "
                f"to both); where SGLang changes one on its own once it speculates, set it there."
            )
    most = max(loads, key=lambda load: load.most_tokens(reserved))
    needed = most.most_tokens(reserved)
    for name, info in infos.items():
        if (room := info.get(_POOL)) is not None and room < needed:
            raise DraftlineError(
                f"the {name} server's KV cache holds {room} tokens, and {most.concurrency} requests at once of {most.name} can "
                f"come to hold {needed}: some would wait, and not in every server alike. Raise serve.max_total_tokens "
                f"or serve.mem_fraction_static, or lower benchmark.concurrency."
            )


def _differences(reference: dict[str, Any], info: dict[str, Any], path: str = "") -> Iterator[str]:
    for name in sorted(reference.keys() | info.keys()):
        if name in _SIZES or (not path and (name in (*_OWN, _POOL) or name.startswith(_SPECULATION))):
            continue
        ours, theirs = reference.get(name), info.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differences(ours, theirs, f"{path}{name}.")
        elif ours != theirs and not (info.get("device") == "cpu" and _GIVEN_UP.get(name) == (ours, theirs)):
            yield f"{path}{name} is {ours!r} and {theirs!r}"
