"""Rows of the report's tables, made and picked: by draft, set, concurrency and temperature; by domain; by length of the context; by answer."""

from collections.abc import Iterable, Iterator, Sequence

from tasks.benchmark.figures import (
    Comparison,
    Pair,
    latency_ms,
    pair_speed,
    pair_speedup,
    speeds,
    spread,
    stream_speed,
)
from tasks.common.acceptance import Acceptance, pool
from tasks.common.benchmark_names import OURS, POOLED
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Pass, speed

# Upper ends of the buckets of context length, in tokens of prompt and answer.
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def cell(of: Comparison, steps: int) -> dict:
    """A row of the table: one draft, set, concurrency and temperature."""
    load = of.load
    return {
        "draft": of.draft,
        "set": of.name,
        "concurrency": load.concurrency,
        "temperature": load.temperature,
        "requests": sum(len(one.answers) for one in of.drafted),
        "repeats": len({one.repeat for one in of.drafted}),
        **acceptance_and_survival(of.acceptance, steps),
        "verify_rounds": of.acceptance.rounds,
        "correct_drafts": of.acceptance.correct,
        "tokens_per_s": _tokens_per_s(of.drafted),
        "baseline_tokens_per_s": _tokens_per_s(of.baseline),
        "stream_tokens_per_s": stream_speed(of.drafted),
        "baseline_stream_tokens_per_s": stream_speed(of.baseline),
        "speedup": round(of.speedup, 3),
        "speedup_interval": rounded(of.speedup_interval),
        "break_even_accept_length": round(of.break_even, 3),
        "first_token_ms": latency_ms(of.drafted, lambda one: one.first_token_seconds),
        "baseline_first_token_ms": latency_ms(of.baseline, lambda one: one.first_token_seconds),
        "inter_token_ms": latency_ms(of.drafted, lambda one: one.inter_token_seconds),
        "baseline_inter_token_ms": latency_ms(of.baseline, lambda one: one.inter_token_seconds),
        "agreement": round(of.agreement, 4) if load.temperature == 0 else None,
    }


def cell_rows(report: dict) -> list[dict]:
    """The cells as flat rows: reports/benchmark_cells.csv."""
    return [dict(_flat(row)) for row in report["cells"]]


def by_draft(report: dict) -> dict[str, list[dict]]:
    """Greedy cells of all sets together, by draft, in ascending order of concurrency; the exported draft is the first."""
    cells = report["cells"]
    names = {cell["set"] for cell in cells}
    wanted = POOLED if POOLED in names else next(iter(names))
    lowest = min(cell["temperature"] for cell in cells)
    drafts = sorted(dict.fromkeys(cell["draft"] for cell in cells), key=lambda draft: draft != OURS)
    return {
        draft: sorted(
            (c for c in cells if (c["draft"], c["set"], c["temperature"]) == (draft, wanted, lowest)),
            key=lambda cell: cell["concurrency"],
        )
        for draft in drafts
    }


def by_domain(pairs: Sequence[Pair], steps: int) -> list[dict]:
    """The same figures for each domain that speculated at all, in alphabetical order."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.question.domain, []).append(pair)
    return [
        {"domain": domain, "prompts": len({pair.question.id for pair in group})}
        | acceptance_and_survival(pool(pair.speculative for pair in group), steps)
        | {
            "tokens_per_s": round(pair_speed(group, "speculative"), 2),
            "baseline_tokens_per_s": round(pair_speed(group, "baseline"), 2),
            "speedup": round(pair_speedup(group), 3),
        }
        for domain, group in sorted(groups.items())
        if any(pair.speculative.verify_rounds for pair in group)
    ]


def by_context(passes: Iterable[Pass]) -> list[dict]:
    """Acceptance by length of the whole answer: beyond the lengths that a draft was trained on it falls (S8).

    Args:
        passes: of all sets and numbers of requests at once; each answer of each counts.
    """
    groups: dict[int, list[Completion]] = {}
    for one in passes:
        for answer in one.answers:
            tokens = answer.prompt_tokens + len(answer.output_ids)
            groups.setdefault(next((n for n, end in enumerate(_CONTEXTS) if tokens <= end), len(_CONTEXTS)), []).append(
                answer
            )
    rows = []
    for number, answers in sorted(groups.items()):
        if any(answer.verify_rounds for answer in answers):
            acceptance = pool(answers)
            rows.append(
                {
                    "tokens": _bucket(number),
                    "answers": len(answers),
                    "verify_rounds": acceptance.rounds,
                    "accept_length": round(acceptance.accept_length, 4),
                }
            )
    return rows


def prompt_rows(pairs: Sequence[Pair]) -> list[dict]:
    """A flat row for each question and repeat: reports/benchmark_prompts.csv."""
    return [
        {
            "prompt": pair.question.id,
            "domain": pair.question.domain,
            "repeat": pair.repeat,
            "prompt_tokens": pair.speculative.prompt_tokens,
            "answer_tokens": len(pair.speculative.output_ids),
            "baseline_tokens": len(pair.baseline.output_ids),
            "finish_reason": pair.speculative.finish_reason,
            "verify_rounds": pair.speculative.verify_rounds,
            "correct_drafts": pair.speculative.correct_drafts,
            "histogram": " ".join(map(str, pair.speculative.correct_drafts_histogram)),
            "accept_length": round(pool([pair.speculative]).accept_length, 4) if pair.speculative.verify_rounds else "",
            "baseline_seconds": round(pair.baseline.seconds, 4),
            "speculative_seconds": round(pair.speculative.seconds, 4),
            "baseline_tokens_per_s": round(pair_speed([pair], "baseline"), 2),
            "speculative_tokens_per_s": round(pair_speed([pair], "speculative"), 2),
            "speedup": round(pair_speedup([pair]), 3),
            "first_difference": "" if pair.first_difference is None else pair.first_difference,
        }
        for pair in pairs
    ]


def acceptance_and_survival(acceptance: Acceptance, steps: int) -> dict:
    """Acceptance length, and survival at each of `steps` positions."""
    return {
        "accept_length": round(acceptance.accept_length, 4),
        "survival": [round(share, 4) for share in acceptance.survival(steps)],
    }


def _tokens_per_s(passes: Sequence[Pass]) -> dict[str, float]:
    """Of all repeats together, whose ratio the speed-up is, and over the repeats."""
    return {"pooled": round(speed(passes), 2)} | spread(speeds(passes))


def _bucket(number: int) -> str:
    low = _CONTEXTS[number - 1] + 1 if number else 1
    return f"{low} to {_CONTEXTS[number]}" if number < len(_CONTEXTS) else f"from {low}"


def _flat(row: dict) -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}_{part}", of_part) for part, of_part in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}_{number}", one) for number, one in enumerate(value, 1))
        else:
            yield name, "" if value is None else value


def rounded(interval: tuple[float, float]) -> list[float]:
    """An interval as the report holds it."""
    return [round(bound, 3) for bound in interval]
