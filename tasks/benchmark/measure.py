"""Asking the plain and the speculative server the same: same token ids, same flags, in turn, warm."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.responses import Response
from tasks.common.server import Server, running
from tasks.common.server_plan import ServerPlan
from tasks.common.sglang_client import Completion

# What a server takes beside weights and KV cache: three Python processes (1.7 GB measured on a CPU).
_OVERHEAD_BYTES = 2e9
# Two servers may claim this much of a GPU between them; the rest is for activations and CUDA contexts.
_GPU_SHARE = 0.9


@dataclass(frozen=True)
class Pair:
    """One prompt, asked of both servers."""

    prompt: Response
    repeat: int
    baseline: Completion
    speculative: Completion

    @property
    def first_difference(self) -> int | None:
        """Position of the first token in which the answers part; None if they are the same."""
        plain, drafted = self.baseline.output_ids, self.speculative.output_ids
        if plain == drafted:
            return None
        same = (a == b for a, b in zip(plain, drafted, strict=False))
        return next((position for position, equal in enumerate(same) if not equal), min(len(plain), len(drafted)))


def measure(
    baseline: ServerPlan, speculative: ServerPlan, prompts: Sequence[Response], params: Params, side_by_side: bool
) -> list[Pair]:
    """Ask every prompt `benchmark.repeats` times of both servers, one request at a time.

    Side by side they answer in turn, so that a slow minute of the machine slows both. The prefix cache is emptied
    before each repeat.
    """
    answers: dict[tuple[str, int, str], Completion] = {}
    for group in [(baseline, speculative)] if side_by_side else [(baseline,), (speculative,)]:
        servers = [Server(plan) for plan in group]
        total = len(group) * (len(prompts) * params.benchmark.repeats + params.benchmark.warmup_prompts)
        with running(*servers), progress(total=total, desc="benchmark", unit="answer") as bar:
            _warm_up(servers, prompts, params, bar)
            for repeat in range(params.benchmark.repeats):
                for server in servers:
                    server.flush_cache()
                for number, prompt in enumerate(prompts):
                    # Who goes first alternates: neither always finds the caches that the other left.
                    for server in servers if (number + repeat) % 2 == 0 else reversed(servers):
                        answers[prompt.id, repeat, server.plan.kind] = _ask(server, prompt, params)
                        bar.update()
    return [
        Pair(prompt, repeat, answers[prompt.id, repeat, "baseline"], answers[prompt.id, repeat, "speculative"])
        for repeat in range(params.benchmark.repeats)
        for prompt in prompts
    ]


def fit_together(plans: Sequence[ServerPlan], params: Params) -> bool:
    """Whether servers of these plans fit into memory at once."""
    if params.target.device != "cpu":
        return len(plans) * params.serve.mem_fraction_static <= _GPU_SHARE
    import psutil

    available = psutil.virtual_memory().available
    return available > sum(_memory(plan, params) for plan in plans)


def _memory(plan: ServerPlan, params: Params) -> float:
    """Bytes that a server on a CPU may come to hold."""
    from tasks.common.target import TargetShape, load_config

    weights = sum(file.stat().st_size for folder in (plan.target, plan.draft) if folder for file in _weights(folder))
    shape = TargetShape.of(load_config(plan.target))
    width = 4 if plan.dtype == "float32" else 2
    token = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * width
    return weights + token * (params.serve.max_total_tokens or params.serve.context_length) + _OVERHEAD_BYTES


def _weights(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors"))


def _warm_up(servers: Sequence[Server], prompts: Sequence[Response], params: Params, bar) -> None:
    for server in servers:
        for number in range(params.benchmark.warmup_prompts):
            _ask(server, prompts[number % len(prompts)], params)
            bar.update()


def _ask(server: Server, prompt: Response, params: Params) -> Completion:
    return server.generate(
        prompt.prompt_token_ids, {"temperature": 0, "max_new_tokens": params.benchmark.max_new_tokens}
    )
