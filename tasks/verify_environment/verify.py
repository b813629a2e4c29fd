"""Find out what is here, check it, and estimate what the run will cost."""

import sys
import time

from tasks.common.check import Check, worst
from tasks.common.errors import DraftlineError
from tasks.common.memory import available_memory
from tasks.common.params import Params
from tasks.common.server_plan import attention_backends, process_environment, server_environment
from tasks.common.target_source import architecture_of, locate
from tasks.common.versions import result_versions
from tasks.verify_environment.checks import asked as asked_checks
from tasks.verify_environment.checks import host, runtime
from tasks.verify_environment.checks import target as target_checks
from tasks.verify_environment.disk import LARGE_FOLDERS, disk_needs
from tasks.verify_environment.facts import Asked, Compute, Engine, Interpreter, Repository, TargetFacts
from tasks.verify_environment.machine import find_gpus, machine_facts
from tasks.verify_environment.plan import Estimate, Workload, estimate
from tasks.verify_environment.probes.interpreter import find as describe_interpreter
from tasks.verify_environment.probes.run import Probe, run_probes
from tasks.verify_environment.prompt_sources import PromptSource, count_prompts
from tasks.verify_environment.report import Report, make_plan


def verify(params: Params) -> Report:
    """Run all probes and all checks; nothing is raised for a check that fails."""
    started = time.monotonic()
    gpus = find_gpus()
    _say(f"measuring {params.target.device} in {params.target.dtype}")
    compute = _measure(params)
    measured = time.monotonic()
    _say("importing SGLang as the server will, reading the target's config, asking DVC (10 to 30 s)")
    backends, configured, refused = attention_choice(params, compute)
    engine, target, on_path, repository, asked = _probe(params, backends)
    probed = time.monotonic()

    ours = Interpreter.model_validate(describe_interpreter())
    sources, unreadable = _count(params)
    load = Workload.of(params, sources)
    layers = target_checks.check_layers(params, target)
    known = layers.verdict == "ok" and compute.memory_bytes_per_s is not None
    estimates: list[Estimate] = estimate(params, load, target, compute) if known else []
    needs = disk_needs(estimates, repository) if known else []
    checks: list[Check] = [
        runtime.check_platform(),
        runtime.check_python(),
        host.check_interpreter(ours, on_path),
        host.check_packages(ours),
        host.check_constraints(params),
        host.check_repository(repository),
        runtime.check_torch(params, compute),
        runtime.check_driver(params, compute, gpus),
        runtime.check_gpus(params, gpus),
        runtime.check_sglang(engine),
        runtime.check_kernels(params, engine),
        runtime.check_server_flags(params, refused),
        runtime.check_attention(engine, backends, configured),
        target_checks.check_config(params, target),
        target_checks.check_capture(target, engine),
        layers,
        target_checks.check_dtype(params, target),
        target_checks.check_lengths(params, target),
        target_checks.check_memory(params, target, gpus, available_memory()),
        host.check_prompts(params, sources, unreadable),
        asked_checks.check_sets(asked),
        asked_checks.check_drafts(asked),
        host.check_disk(needs),
        host.check_quota(params, estimates),
        host.check_ports(params),
    ]
    return Report(
        verdict=worst(checks),
        checks=checks,
        plan=make_plan(params, sources, load, estimates, needs),
        versions=result_versions(),
        machine=machine_facts(),
        gpus=gpus,
        compute=compute,
        engine=engine,
        target=target,
        interpreter=on_path,
        repository=repository,
        seconds={
            "measure": round(measured - started, 1),
            "probes": round(probed - measured, 1),
            "all": round(time.monotonic() - started, 1),
        },
    )


def _measure(params: Params) -> Compute:
    """Alone, since other work on the host would slow the matrix product."""
    arguments = {"device": params.target.device, "dtype": params.target.dtype}
    return Compute.model_validate(run_probes(Probe("compute", arguments))["compute"])


def _probe(params: Params, backends: tuple[str, ...]) -> tuple[Engine, TargetFacts, Interpreter, Repository, Asked]:
    wanted = {"backends": backends, "architecture": _architecture(params)}
    named = params.benchmark.sets or params.benchmark.drafts
    answers = run_probes(
        Probe("engine", wanted, process_environment(server_environment(params))),
        Probe("target", params.target.model_dump()),
        Probe("interpreter", python="python"),
        Probe("repository", LARGE_FOLDERS),
        *([Probe("asked", params.model_dump(mode="json"))] if named else []),
    )
    return (
        Engine.model_validate(answers["engine"]),
        TargetFacts.model_validate(answers["target"]),
        Interpreter.model_validate(answers["interpreter"]),
        Repository.model_validate(answers["repository"]),
        Asked.model_validate(answers.get("asked", {})),
    )


def _architecture(params: Params) -> str | None:
    try:
        return architecture_of(locate(params.target, weights=False))
    except DraftlineError:
        return None  # the probe `target` fails with the same message


def _count(params: Params) -> tuple[list[PromptSource], str | None]:
    try:
        return count_prompts(params.prompts), None
    except DraftlineError as error:
        return [], str(error)


def attention_choice(params: Params, compute: Compute) -> tuple[tuple[str, ...], bool, str | None]:
    """Attention backends of the server, whether flags name them, and why the flags are refused if they are."""
    try:
        named = attention_backends(params)
    except DraftlineError as error:
        return (), False, str(error)
    if named:
        return named, True, None
    # SGLang 0.5.23, get_default_attn_backend: FlashAttention 3 on Hopper for chains, FlashInfer's kernels elsewhere.
    on_hopper = compute.capability is not None and compute.capability[0] == 9
    return ("fa3" if on_hopper and params.serve.eagle_topk == 1 else "flashinfer",), False, None


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
