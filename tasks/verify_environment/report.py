"""reports/environment.json: everything that was found and estimated. No later stage depends on it."""

from pydantic import BaseModel, ConfigDict

from tasks.common.check import Check, Verdict
from tasks.common.params import Params
from tasks.verify_environment.disk import Need
from tasks.verify_environment.facts import Compute, Engine, Gpus, Interpreter, Repository, TargetFacts
from tasks.verify_environment.plan import Estimate, Workload
from tasks.verify_environment.prompt_sources import PromptSource


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(_Part):
    """What the run will do and cost.

    Attributes:
        settings: the parameters that decide cost and outcome.
        stages: empty where the target or its speed is not known.
        disk: needs by file system.
    """

    folder: str
    sources: list[PromptSource]
    settings: dict[str, str | int | float | list[int] | None]
    stages: list[Estimate]
    disk: list[Need]
    seconds: float
    gpu_hours: float


class Report(_Part):
    verdict: Verdict
    checks: list[Check]
    plan: Plan
    versions: dict[str, str | None]
    machine: dict
    gpus: Gpus
    compute: Compute
    engine: Engine
    target: TargetFacts
    interpreter: Interpreter
    repository: Repository
    seconds: dict[str, float]


def make_plan(
    params: Params, sources: list[PromptSource], load: Workload, estimates: list[Estimate], needs: list[Need]
) -> Plan:
    """Gather what the run will do and cost."""
    train, serve = params.train_draft, params.serve
    tokens = train.max_steps * train.global_batch_size * train.batch_tokens
    return Plan(
        folder=params.prompts.folder,
        sources=sources,
        settings={
            "target": params.target.model,
            "device": params.target.device,
            "dtype": params.target.dtype,
            "engine": params.regenerate.engine,
            "max_new_tokens": params.regenerate.max_new_tokens,
            "temperature": params.regenerate.temperature,
            "storage_dtype": params.dump.storage_dtype,
            "draft_vocab_size": train.draft_vocab_size,
            "ttt_length": train.ttt_length,
            "max_steps": train.max_steps,
            "epochs": round(tokens / load.train_tokens, 1) if load.train_tokens else None,
            "chain": [serve.num_steps, serve.eagle_topk, serve.num_draft_tokens],
            "benchmark_prompts": params.benchmark.num_prompts,
        },
        stages=estimates,
        disk=needs,
        seconds=sum(estimate.seconds for estimate in estimates),
        gpu_hours=sum(estimate.gpu_hours for estimate in estimates),
    )
