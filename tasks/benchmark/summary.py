"""From pairs of answers to figures: acceptance, speed, their spread, and whether the text is the same."""

import random
from collections.abc import Sequence
from importlib.metadata import version

from tasks.benchmark.measure import Pair
from tasks.common.acceptance import pool
from tasks.common.params import Params

_RESAMPLES = 2000


def summarise(pairs: Sequence[Pair], params: Params, predicted: float, side_by_side: bool) -> dict:
    """The report of a benchmark.

    Args:
        predicted: acceptance length that train_draft predicted from held-out answers.
        side_by_side: whether both servers ran at once.

    Raises:
        DraftlineError: no speculation ran (S4).
    """
    acceptance = pool(pair.speculative for pair in pairs)
    parted = next((pair for pair in pairs if pair.first_difference is not None), None)
    low, high = speedup_interval(pairs)
    return {
        "speculative": _figures(pairs, params.serve.num_steps)
        | {"verify_rounds": acceptance.rounds, "correct_drafts": acceptance.correct},
        "baseline": {"tokens_per_s": round(_speed(pairs, "baseline"), 2)},
        "speedup": round(_speedup(pairs), 3),
        "speedup_interval": [round(low, 3), round(high, 3)],
        "break_even_accept_length": round(break_even(pairs), 3),
        "lossless": parted is None,
        "first_difference": _difference(parted) if parted else None,
        "predicted_accept_length": predicted,
        "served_over_predicted": round(acceptance.accept_length / predicted, 3),
        "survival": [round(share, 4) for share in acceptance.survival(params.serve.num_steps)],
        "by_domain": by_domain(pairs, params.serve.num_steps),
        "settings": {
            "engine": "sglang",
            "version": version("sglang"),
            "steps": params.serve.num_steps,
            "topk": params.serve.eagle_topk,
            "draft_tokens": params.serve.num_draft_tokens,
            "temperature": 0.0,
            "prompts": len({pair.prompt.id for pair in pairs}),
            "max_new_tokens": params.benchmark.max_new_tokens,
            "repeats": params.benchmark.repeats,
            "requests_at_once": 1,
            "servers": "side by side, asked in turn" if side_by_side else "one after the other (no room for both)",
            "device": params.target.device,
            "dtype": params.target.dtype,
        },
    }


def by_domain(pairs: Sequence[Pair], steps: int) -> list[dict]:
    """The same figures for each domain that speculated at all, in alphabetical order."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.prompt.domain, []).append(pair)
    return [
        {"domain": domain, "prompts": len({pair.prompt.id for pair in group})}
        | _figures(group, steps)
        | {"baseline_tokens_per_s": round(_speed(group, "baseline"), 2), "speedup": round(_speedup(group), 3)}
        for domain, group in sorted(groups.items())
        if any(pair.speculative.verify_rounds for pair in group)
    ]


def speedup_interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    """95 % interval of the speed-up, by bootstrap over prompts: all repeats of a prompt are drawn together."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.prompt.id, []).append(pair)
    prompts, draw = list(groups.values()), random.Random(0)
    speedups = sorted(
        _speedup([pair for group in draw.choices(prompts, k=len(prompts)) for pair in group]) for _ in range(_RESAMPLES)
    )
    return speedups[int(0.025 * _RESAMPLES)], speedups[int(0.975 * _RESAMPLES)]


def break_even(pairs: Sequence[Pair]) -> float:
    """The acceptance length at which speculation costs as much as it saves: time of a round over time of a plain token.

    Prefill counts on both sides.
    """
    rounds = sum(pair.speculative.verify_rounds for pair in pairs)
    seconds = sum(pair.speculative.seconds for pair in pairs)
    return seconds / rounds * _speed(pairs, "baseline")


def prompt_rows(pairs: Sequence[Pair]) -> list[dict]:
    """A flat row for each prompt and repeat: reports/benchmark_prompts.csv."""
    return [
        {
            "prompt": pair.prompt.id,
            "domain": pair.prompt.domain,
            "repeat": pair.repeat,
            "prompt_tokens": pair.speculative.prompt_tokens,
            "answer_tokens": len(pair.speculative.output_ids),
            "finish_reason": pair.speculative.finish_reason,
            "verify_rounds": pair.speculative.verify_rounds,
            "correct_drafts": pair.speculative.correct_drafts,
            "histogram": " ".join(map(str, pair.speculative.correct_drafts_histogram)),
            "accept_length": round(pool([pair.speculative]).accept_length, 4) if pair.speculative.verify_rounds else "",
            "baseline_seconds": round(pair.baseline.seconds, 4),
            "speculative_seconds": round(pair.speculative.seconds, 4),
            "baseline_tokens_per_s": round(_speed([pair], "baseline"), 2),
            "speculative_tokens_per_s": round(_speed([pair], "speculative"), 2),
            "speedup": round(_speedup([pair]), 3),
            "first_difference": "" if pair.first_difference is None else pair.first_difference,
        }
        for pair in pairs
    ]


def _figures(pairs: Sequence[Pair], steps: int) -> dict:
    acceptance = pool(pair.speculative for pair in pairs)
    return {
        "accept_length": round(acceptance.accept_length, 4),
        "tokens_per_s": round(_speed(pairs, "speculative"), 2),
        "survival": [round(share, 4) for share in acceptance.survival(steps)],
    }


def _speed(pairs: Sequence[Pair], arm: str) -> float:
    """Generated tokens per second of waiting, prefill included."""
    answers = [getattr(pair, arm) for pair in pairs]
    return sum(len(answer.output_ids) for answer in answers) / sum(answer.seconds for answer in answers)


def _speedup(pairs: Sequence[Pair]) -> float:
    return _speed(pairs, "speculative") / _speed(pairs, "baseline")


def _difference(pair: Pair) -> dict:
    at = pair.first_difference
    return {
        "prompt": pair.prompt.id,
        "position": at,
        "baseline": pair.baseline.output_ids[at : at + 1],
        "speculative": pair.speculative.output_ids[at : at + 1],
    }
