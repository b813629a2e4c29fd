"""A target with its draft, and the target alone, served by one GPU and by two, under the options of their all-reduce.

A pair of servers, plain and with the draft, for each way; all get the same questions under the same flags. Pairs that run beside
each other are asked in turn, pass by pass.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.gpu.padded_heads import pad_draft
from infra.gpu.places import BUILTIN_PROMPTS, PORT_STEP
from infra.gpu.two_gpus_pairs import ONE, Pair, Way, summary, ways
from infra.gpu.two_gpus_runs import Found
from infra.gpu.two_gpus_settings import (
    GPUS,
    Settings,
    Sizes,
    over_both,
    prepare_padded_target,
)
from tasks.collect_prompts.collect import collect_prompts
from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.params import Params
from tasks.common.prompts import read_prompts, spread_over_domains
from tasks.common.server_gpus import ServerGpus
from tasks.common.server_plan import baseline_plan
from tasks.common.target import load_tokenizer, render_prompt, target_contract
from tasks.common.traffic import Load, Pass, Question
from tasks.prepare_target.prepare import prepare_target

# Pairs that run beside each other: starts, of which each takes a minute, are waited for together.
_PAIRS_AT_ONCE = {"cuda": 4, "cpu": 1}
_LONGEST_START_S = 220
# Below this no more servers are started: they would not be ready in time to be asked anything.
_LEAST_S = {"cuda": 150, "cpu": 60}
# A prompt and its answer end before the context does.
_SPARE_TOKENS = 16


def measure(settings: Settings, found: Found) -> None:
    """Each way, some beside each other; what fails does not end the others."""
    sizes, padded = settings.sizes, prepare_padded_target(settings)
    contract = Contract.model_validate(read_json(Path(settings.draft) / "draftline.json")["contract"])
    params = settings.params(
        padded,
        contract={"aux_layer_ids": contract.aux_layer_ids},
        prompts={
            "folder": str(BUILTIN_PROMPTS),
            "max_prompt_tokens": sizes.context_length - sizes.answer_tokens - _SPARE_TOKENS,
        },
        serve={
            "context_length": sizes.context_length,
            "max_running_requests": sizes.many,
            "max_total_tokens": sizes.many * sizes.context_length,
            # Of the whole GPU, although several share it: max_total_tokens bounds what each takes.
            "mem_fraction_static": 0.5,
            "startup_timeout_s": round(_LONGEST_START_S * sizes.patience),
        },
    )
    draft = _padded_draft(settings, params, contract)
    loads, at_once, left = _loads(params, sizes), _PAIRS_AT_ONCE[settings.device], ways(params)[: sizes.ways]
    reference: list[Pass] = []
    while left:
        beside, left = left[:at_once], left[at_once:]
        if found.seconds_left < _LEAST_S[settings.device]:
            for way in beside:
                found.note(way.name, {"failed": f"not started: {found.seconds_left:.0f} s were left"})
            continue
        _measure_beside(beside, params, draft, loads, sizes.repeats, reference, found)
        ServerGpus(baseline_plan(over_both(params))).require_idle()


def _padded_draft(settings: Settings, params: Params, contract: Contract) -> Path:
    """The draft for the padded target; it must be one of the target that was given."""
    original, padded = Path("original_target"), Path("padded_draft").absolute()
    prepare_target(params.target.model_copy(update={"model": settings.target}), original)
    contract.require_same(target_contract(params.contract, original), settings.draft, settings.target)
    pad_draft(Path(settings.draft), padded, GPUS, target_contract(params.contract).target_sha256)
    return padded


def _loads(params: Params, sizes: Sizes) -> list[Load]:
    """One user, and many."""
    tokenizer = load_tokenizer()
    collect_prompts(params.prompts, tokenizer)
    prompts = spread_over_domains([*read_prompts("heldout"), *read_prompts("train")], 4 * sizes.many)
    questions = [Question(prompt.id, prompt.domain, render_prompt(tokenizer, prompt.messages)) for prompt in prompts]
    return [
        Load.of("builtin", questions, sizes.questions, concurrency, 0.0, sizes.answer_tokens)
        for concurrency in (1, sizes.many)
    ]


def _measure_beside(
    beside: Sequence[Way],
    params: Params,
    draft: Path,
    loads: Sequence[Load],
    repeats: int,
    reference: list[Pass],
    found: Found,
) -> None:
    """Pairs that run beside each other, asked in turn; one that fails is stopped and noted, the others go on.

    Args:
        reference: the passes of the first way, which the others' answers are compared with; filled when it is asked.
    """
    running: list[Pair] = []

    def stop(pair: Pair) -> None:
        try:
            pair.stop()
        except DraftlineError as error:
            found.note(f"{pair.way.name}, stopped", {"failed": str(error)})

    def each(work: Callable[[Pair], None]) -> float:
        began = time.perf_counter()
        for pair in list(running):
            try:
                work(pair)
            except Exception as error:
                asked = found.values.get(pair.way.name, {})
                found.note(pair.way.name, asked | {"failed": f"{type(error).__name__}: {error}"})
                running.remove(pair)
                stop(pair)
        return time.perf_counter() - began

    try:
        for number, way in enumerate(beside):
            running.append(Pair(way, params, draft, params.serve.port + 2 * number * PORT_STEP))
        started = each(Pair.launch) + each(Pair.wait_until_ready)
        pass_s = each(lambda pair: pair.warm_up(loads))
        for repeat in range(repeats):
            if found.seconds_left < pass_s:
                break
            pass_s = each(lambda pair, repeat=repeat: pair.ask(loads, repeat))
            for pair in running:
                if pair.way.name == ONE:
                    reference[:] = pair.passes
                found.note(pair.way.name, summary(pair.passes, reference) | {"seconds_to_start": round(started, 1)})
    finally:
        for pair in running:
            stop(pair)
