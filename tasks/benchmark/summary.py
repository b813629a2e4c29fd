"""The report of a benchmark, from its passes."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from tasks.benchmark.arms import Arm
from tasks.benchmark.conditions import shown
from tasks.benchmark.figures import Comparison, Pair, compare
from tasks.benchmark.measure import Measured
from tasks.benchmark.rows import acceptance_and_survival, by_context, by_domain, cell, rounded
from tasks.benchmark.wording import requests
from tasks.common.advice_reports import measured_step_share, scaling_fit
from tasks.common.benchmark_names import BASELINE, HELDOUT, OURS
from tasks.common.break_even import advice
from tasks.common.files import sha256_json
from tasks.common.measured_draft import params_sha256
from tasks.common.params import Params
from tasks.common.traffic import Pass, speed

_APART = (
    "The servers ran one after the other, since memory had no room for all: how much faster or slower the machine was under one of "
    "them is part of the speed-up, and no interval shows it."
)


def summarise(
    measured: Measured, arms: Sequence[Arm], params: Params, predicted: float | None, identity: Mapping[str, str]
) -> dict:
    """The report.

    Args:
        predicted: acceptance length that train_draft predicted from held-out answers; None where other questions are asked.
        identity: hashes of target and draft, and the machine, for the settings.

    Raises:
        DraftlineError: no speculation ran (S4).
    """
    comparisons = compared(measured.passes, arms)
    ours = headline_comparison(comparisons)
    steps, pairs, acceptance = params.serve.num_steps, ours.pairs, ours.acceptance
    parted = next((pair for pair in pairs if pair.first_difference is not None), None)
    settings = _settings(measured, params, pairs) | dict(identity)
    return {
        "speculative": acceptance_and_survival(acceptance, steps)
        | {
            "tokens_per_s": round(speed(ours.drafted), 2),  # of all users, as the plain server's
            "verify_rounds": acceptance.rounds,
            "correct_drafts": acceptance.correct,
        },
        "baseline": {"tokens_per_s": round(speed(ours.baseline), 2)},
        "speedup": round(ours.speedup, 3),
        "speedup_interval": rounded(ours.speedup_interval),
        "break_even_accept_length": round(ours.break_even, 3),
        "lossless": parted is None,
        "first_difference": _difference(parted) if parted else None,
        "agreement": {"answers": round(ours.agreement, 4), "tokens": round(ours.agreed_tokens, 4)},
        "predicted_accept_length": predicted,
        "served_over_predicted": round(acceptance.accept_length / predicted, 3) if predicted else None,
        "survival": [round(share, 4) for share in acceptance.survival(steps)],
        "by_domain": by_domain(pairs, steps),
        "by_context": by_context(one for one in measured.passes if one.arm == OURS and one.load.temperature == 0),
        "cells": [cell(comparison, steps) for comparison in comparisons],
        "drafts": {
            arm.name: {
                "folder": str(arm.plan.draft),
                "steps": steps,
                "topk": params.serve.eagle_topk,
                "draft_tokens": params.serve.num_draft_tokens,
            }
            for arm in arms
            if arm.plan.draft
        },
        "advice": [*_advice(comparisons, ours.name, params, settings), *([] if measured.side_by_side else [_APART])],
        "settings": settings,
    }


def compared(passes: Sequence[Pass], arms: Sequence[Arm]) -> list[Comparison]:
    """Each draft against the plain server, at every load that both have answered."""
    return list(compare(passes, [arm.name for arm in arms if arm.plan.draft], BASELINE))


def headline_comparison(comparisons: Sequence[Comparison]) -> Comparison:
    """Our draft, greedily, at the lowest concurrency, over all sets: what a run is judged by."""
    ours = [one for one in comparisons if one.draft == OURS and one.load.temperature == 0]
    lowest = min(one.load.concurrency for one in ours)
    return [one for one in ours if one.load.concurrency == lowest][-1]  # where several sets are pooled, that comes last


def _advice(comparisons: Sequence[Comparison], of_set: str, params: Params, settings: Mapping) -> Iterator[str]:
    """Whether our draft pays at each concurrency, and what would be needed where it does not; what holds of several is said once,
    at the end."""
    serve, scaling = params.serve, scaling_fit()
    verdicts: dict[int, str] = {}
    further: dict[str, list[int]] = {}
    for one in comparisons:
        if (one.draft, one.name, one.load.temperature) != (OURS, of_set, 0):
            continue
        concurrency = one.load.concurrency
        low, high = one.speedup_interval
        verdict, *more = advice(
            one.acceptance.accept_length,
            one.acceptance.survival(serve.num_steps),
            serve.num_steps,
            one.break_even,
            topk=serve.eagle_topk,
            is_faster=low > 1,
            draft_step_share=measured_step_share(concurrency, serve.num_steps, serve.eagle_topk, settings),
            scaling=scaling,
        )
        unsure = f" (95 %: {low:.2f} to {high:.2f}), which is not told apart from 1" if low <= 1 <= high else ""
        verdicts[concurrency] = f"{verdict} Prefill included it is {one.speedup:.2f} times{unsure}."
        for sentence in more:
            further.setdefault(sentence, []).append(concurrency)
    for concurrency, verdict in verdicts.items():
        own = [sentence for sentence, at in further.items() if at == [concurrency]]
        yield f"{requests(concurrency)}: {' '.join([verdict, *own])}"
    for sentence, at in further.items():
        if len(at) > 1:
            yield f"{', '.join(map(str, at[:-1]))} and {requests(at[-1])}: {sentence}"


def _settings(measured: Measured, params: Params, pairs: Sequence[Pair]) -> dict:
    asked = params.benchmark
    return {
        "target": params.target.model,
        "engine": "sglang",
        "version": version("sglang"),
        "steps": params.serve.num_steps,
        "topk": params.serve.eagle_topk,
        "draft_tokens": params.serve.num_draft_tokens,
        "temperature": 0.0,
        "num_prompts": asked.num_prompts,
        "prompts": len({pair.question.id for pair in pairs}),
        "prompts_sha256": sha256_json(sorted({pair.question.id for pair in pairs})),
        "sets": list(asked.sets) or [HELDOUT],
        "max_new_tokens": asked.max_new_tokens,
        "repeats": asked.repeats,
        "concurrency": list(asked.concurrency),
        "temperatures": list(asked.temperatures),
        "params_sha256": params_sha256(params),
        "servers": "side by side, asked in turn" if measured.side_by_side else "one after the other (no room for all)",
        "device": params.target.device,
        "dtype": params.target.dtype,
        "extra_args": list(params.serve.extra_args),
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "conditions": shown(measured.infos),
    }


def _difference(pair: Pair) -> dict:
    at = pair.first_difference
    return {
        "prompt": pair.question.id,
        "position": at,
        "baseline": pair.baseline.output_ids[at : at + 1],
        "speculative": pair.speculative.output_ids[at : at + 1],
    }
