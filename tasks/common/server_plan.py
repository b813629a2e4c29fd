"""What is said to SGLang, and why: the whole command line and environment of a server, checked before it starts.

Three kinds of server, with the same flags wherever they could change speed or results:

    baseline_plan      the target alone
    speculative_plan   the target with an exported EAGLE-3 draft (speculative_plan.py)
    states_plan        the target with hooks that write its states (tasks/dump_hidden_states/states_plan.py)

Each setting carries its reason; `python -m tasks.launch_server --print` shows them.
"""

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.target import TARGET, TargetShape, load_config, model_folder

# Import hook and kernel stand-in without which no released SGLang wheel runs on a CPU.
_CPU_ENGINE = Path(__file__).resolve().parents[2] / "infra" / "sglang_cpu"
# What torchrun sets for each of its processes (torch.distributed.run, 'Environment Variables').
_OF_TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")
# What SGLang pretends with such a variable would be reported as measured; it still reads the older beginning (sglang/srt/environ.py).
_SIMULATION = ("SGLANG_SIMULATE_", "SGL_SIMULATE_")
# Other spellings of flags that a plan sets, so that `serve.extra_args` cannot slip past it.
_ALIASES = ("--model",)
# Of speculation's flags the one that changes nothing of what is drafted; a plain server ignores it.
_DRAFT_ATTENTION = "--speculative-draft-attention-backend"
# Each a number of GPUs, which multiply.
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
_PIPELINE_PARALLEL = ("--pp-size", "--pipeline-parallel-size")
_DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")


@dataclass(frozen=True)
class Setting:
    """A flag or an environment variable of a server, with the reason why it is there."""

    name: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class ServerPlan:
    """A checked server: what to start, and what it must say of itself once it runs.

    Attributes:
        algorithm: what /server_info must report as speculative_algorithm.
        target: folder of the target's weights.
        draft: folder of the exported draft, None without speculation.
        flags: the command line, without the weight version that the run adds.
    """

    kind: Literal["speculative", "baseline", "states"]
    port: int
    startup_timeout_s: int
    device: str
    dtype: str
    target: Path
    draft: Path | None
    algorithm: str | None
    flags: tuple[Setting, ...]
    environment: tuple[Setting, ...]

    def command(self, weight_version: str) -> list[str]:
        """Arguments to start; `weight_version` comes back in every answer and tells this server from a stale one."""
        words = [word for flag in self.flags for word in (flag.name, *flag.values)]
        return [sys.executable, "-m", "sglang.launch_server", *words, "--weight-version", weight_version]

    @property
    def gpus(self) -> range:
        """GPUs that the server spans, as it counts them."""
        first = next((int(flag.values[0]) for flag in self.flags if flag.name == "--base-gpu-id"), 0)
        return range(first, first + spanned_gpus([word for flag in self.flags for word in (flag.name, *flag.values)]))

    @property
    def bounds_its_cache(self) -> bool:
        """Whether the size of the KV cache is stated, and not taken from the memory that is free when the server starts."""
        return any(flag.name == "--max-total-tokens" for flag in self.flags)

    def adding(self, flags: tuple[Setting, ...], environment: tuple[Setting, ...] = ()) -> "ServerPlan":
        """The same server with more settings; of a path that is set already, the new places come first."""
        merged = {setting.name: setting for setting in self.environment}
        for setting in environment:
            held = merged.get(setting.name)
            places = os.pathsep.join([*setting.values, *(held.values if held else ())])
            reasons = f"{setting.reason}; {held.reason}" if held else setting.reason
            merged[setting.name] = Setting(setting.name, (places,), reasons)
        return replace(self, flags=(*self.flags, *flags), environment=tuple(merged.values()))

    def with_hidden_states(self) -> "ServerPlan":
        """The same server, able to answer with the states that the draft is fed (contract, section 6)."""
        return self.adding(
            (
                flag("--enable-return-hidden-states", reason="answers carry the states of every token"),
                flag("--disable-radix-cache", reason="the states of prompt tokens found in the cache are left out"),
            )
        )


def baseline_plan(params: Params, *, port: int | None = None, target: Path = TARGET) -> ServerPlan:
    """The target without speculation, under the flags that the speculative server has too.

    Args:
        port: other than `serve.port`, where two servers run at once.

    Raises:
        DraftlineError: the settings cannot be served; says which and why.
    """
    _check_context(params, target)
    return plan_over(params, port or params.serve.port, model_folder(params.target, target))


def plan_over(params: Params, port: int, model: Path) -> ServerPlan:
    """The target without speculation, whose weights may not be there yet: `serve.context_length` is not held against its config.

    Args:
        model: folder of the weights, or their name on the hub.

    Raises:
        DraftlineError: `serve.extra_args` or `serve.environment` sets what Draftline sets itself.
    """
    shared = _shared_flags(params, port, model)
    return ServerPlan(
        kind="baseline",
        port=port,
        startup_timeout_s=params.serve.startup_timeout_s,
        device=params.target.device,
        dtype=params.target.dtype,
        target=model,
        draft=None,
        algorithm=None,
        flags=(*shared, *_extra_flags(params, shared)),
        environment=server_environment(params),
    )


def flag(name: str, *values: str, reason: str) -> Setting:
    """A setting as it is written: its name, its values, and why."""
    return Setting(name, values, reason)


def spanned_gpus(words: Sequence[str]) -> int:
    """GPUs that one server holds: the product of the parallel sizes among its arguments."""
    split = [part for word in words for part in word.split("=", 1)]
    # Where attention alone is data parallel, its groups lie among the GPUs of tensor parallelism.
    replicas = () if "--enable-dp-attention" in split else _DATA_PARALLEL
    counted = (*TENSOR_PARALLEL, *_PIPELINE_PARALLEL, *replicas)
    return math.prod(int(value) for name, value in pairwise(split) if name in counted and value.isdigit())


def refuse_flags(params: Params, refused: dict[str, str]) -> None:
    """
    Args:
        refused: flag to the rest of the sentence, from 'which' on.

    Raises:
        DraftlineError: `serve.extra_args` holds one of them, whole or as a beginning that SGLang's parser takes for it.
    """
    for word in params.serve.extra_args:
        written = word.partition("=")[0]
        name = written if written in refused else next((n for n in refused if n.startswith(written)), None)
        if word.startswith("--") and name:
            raise DraftlineError(f"{PARAMS}: serve.extra_args holds {written}, {refused[name]}")


def _shared_flags(params: Params, port: int, model: Path) -> tuple[Setting, ...]:
    serve, kind, _, index = params.serve, *params.target.device.partition(":")
    flags = [
        flag("--model-path", str(model), reason="the target's weights"),
        flag("--host", "127.0.0.1", reason="loopback: nobody else can reach it"),
        flag("--port", str(port), reason="serve.port"),
        flag("--device", kind, reason="target.device"),
        flag("--dtype", params.target.dtype, reason="target.dtype: the draft was trained on states of this type"),
        flag("--context-length", str(serve.context_length), reason="serve.context_length, within target and draft"),
        flag(
            "--max-running-requests",
            str(serve.max_running_requests),
            reason="serve.max_running_requests; left out, SGLang would take 48 once it speculates",
        ),
        flag(
            "--mem-fraction-static",
            str(serve.mem_fraction_static),
            reason="weights and KV cache get at most this share of the memory that is free before they are loaded",
        ),
        flag("--sleep-on-idle", reason="an idle server would otherwise spin on a whole core"),
    ]
    if serve.max_total_tokens:
        flags.append(
            flag(
                "--max-total-tokens",
                str(serve.max_total_tokens),
                reason="serve.max_total_tokens: the size of the KV cache",
            )
        )
    if index:
        flags.append(flag("--base-gpu-id", index, reason="target.device names this GPU"))
    if params.target.trust_remote_code:
        flags.append(flag("--trust-remote-code", reason="target.trust_remote_code"))
    if kind == "cpu":
        why = "the only CPU backend that verifies drafts (a plain --attention-backend becomes torch_native)"
        flags.append(flag("--prefill-attention-backend", "intel_amx", reason=why))
        flags.append(flag("--decode-attention-backend", "intel_amx", reason="as above"))
    return tuple(flags)


def server_environment(params: Params) -> tuple[Setting, ...]:
    """What every server gets, whatever it serves; `process_environment` adds it to this process's own.

    Raises:
        DraftlineError: `serve.environment` sets a variable that Draftline or torchrun sets, or SGLang is told to simulate.
    """
    for where, names in ((f"{PARAMS}: serve.environment", params.serve.environment), ("the shell", os.environ)):
        if simulated := next((name for name in names if name.startswith(_SIMULATION)), None):
            raise DraftlineError(
                f"{where} sets {simulated}: SGLang would simulate what is to be measured. Expected: no {'* or '.join(_SIMULATION)}*. Unset it."
            )
    planned = _planned_environment(params)
    taken = {setting.name for setting in planned} | {"PYTHONPATH"}
    for name in params.serve.environment:
        if name in taken or _OF_TORCHRUN.fullmatch(name):
            raise DraftlineError(
                f"{PARAMS}: serve.environment sets {name}, which is set by Draftline or by torchrun and would not be what the "
                f"server gets. Remove it (`python -m tasks.launch_server --print` shows what a server gets)."
            )
    return (*planned, *(flag(*pair, reason="serve.environment") for pair in params.serve.environment.items()))


def _planned_environment(params: Params) -> tuple[Setting, ...]:
    offline = flag("HF_HUB_OFFLINE", "1", reason="target and draft are local folders: nothing is to be fetched")
    if params.target.device != "cpu":
        return (offline,)
    return (
        offline,
        flag("SGLANG_USE_CPU_ENGINE", "1", reason="selects SGLang's CPU engine"),
        flag("PYTHONPATH", str(_CPU_ENGINE), reason="first on the path: what the wheel lacks on a CPU"),
        flag("TORCHDYNAMO_DISABLE", "1", reason="spares half a minute of compiling at the first request"),
    )


def process_environment(settings: tuple[Setting, ...]) -> dict[str, str]:
    """This process's environment with the settings; what PYTHONPATH holds already stays behind them.

    Left out is what torchrun told this process of its own group. A server that inherits TORCHELASTIC_USE_AGENT_STORE takes
    its store for one that torchrun's agent holds, where none is, and gives up after minutes.
    """
    environment = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}
    for setting in settings:
        inherited = [environment[setting.name]] if setting.name == "PYTHONPATH" and setting.name in environment else []
        environment[setting.name] = os.pathsep.join([*setting.values, *inherited])
    return environment


def attention_backends(params: Params) -> tuple[str, ...]:
    """Attention backends that the flags name; none where the choice is left to SGLang."""
    shared = _shared_flags(params, params.serve.port, TARGET)
    named = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
    flags = (flag for flag in (*shared, *_extra_flags(params, shared)) if flag.name in named)
    return tuple(dict.fromkeys(value for flag in flags for value in flag.values))


def _extra_flags(params: Params, planned: tuple[Setting, ...]) -> list[Setting]:
    extras: list[Setting] = []
    for word in params.serve.extra_args:
        if re.match("-[A-Za-z]", word):
            raise DraftlineError(
                f"{PARAMS}: serve.extra_args holds {word}; flags of SGLang's server begin with two dashes."
            )
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            extras.append(Setting(name, (value,) if equals else (), "serve.extra_args"))
        elif extras:
            extras[-1] = replace(extras[-1], values=(*extras[-1].values, word))
        else:
            raise DraftlineError(f"{PARAMS}: serve.extra_args starts with {word!r}, which belongs to no flag.")
    taken = {flag.name for flag in planned} | {"--speculative-algorithm", "--weight-version", *_ALIASES}
    speculative = {extra.name for extra in extras if extra.name.startswith("--speculative-")} - {_DRAFT_ATTENTION}
    why = (
        "which Draftline sets itself so that it can be checked. Change the parameter that it comes from "
        "(`python -m tasks.launch_server --print` names it)."
    )
    refuse_flags(
        params, dict.fromkeys((*taken, *speculative), why) | {"--help": "with which no server starts. Remove it."}
    )
    return extras


def _check_context(params: Params, target: Path) -> None:
    limit = TargetShape.of(load_config(target)).max_position_embeddings
    if params.serve.context_length > limit:
        raise DraftlineError(
            f"{PARAMS}: serve.context_length is {params.serve.context_length}, but {target / 'config.json'} has {limit} "
            f"positions. Set serve.context_length to at most {limit}."
        )
