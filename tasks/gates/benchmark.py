"""Gate on the benchmark: acceptance high enough and no lower than before, speculation proven on, text unchanged, and figures
that can be true."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import pandas as pd

from tasks.common.benchmark_names import HELDOUT, OURS, POOLED
from tasks.common.files import sha256_json
from tasks.common.measured_draft import identities, params_sha256
from tasks.common.params import Params
from tasks.common.traffic import asked_at
from tasks.gates import benchmark_suite as suite
from tasks.gates.accepted_benchmark import compare
from tasks.gates.benchmark_cells import accept_length, cell_name, cell_tables
from tasks.gates.benchmark_files import headline_cell, headline_cells, read_answers, read_report
from tasks.gates.benchmark_suite import Severity
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, show

LEAD = (
    "After benchmark: the served draft is accepted as often as gates.min_accept_length asks, as training predicted and as in the "
    "last accepted report, the text is what the target writes alone, and no figure is better than it can be."
)
# Of fewer rounds a bucket of context lengths is mostly chance.
_MIN_ROUNDS = 50
_COUNTS = ("correct_drafts", "verify_rounds")
# Figures of the report that its table has too.
_REPEATED = ("speedup", "break_even_accept_length")
# Of each answer's beginning the share that is the plain server's is counted: of a whole answer less is left the longer it is.
_BEGINNING = 32  # tokens


def build(params: Params) -> Gate:
    """Read reports/benchmark.json and benchmark_prompts.csv, which target and draft lie in artifacts/, and of git's HEAD the
    benchmark.json that was accepted.

    Raises:
        DraftlineError: a report is absent or damaged; names file and field.
    """
    report, prompts = read_report(), _prompts()
    lossless: Severity = "critical" if params.target.dtype == "float32" else "warning"
    predicted = report["predicted_accept_length"]
    figures = {
        "acceptance length": report["speculative"]["accept_length"],
        "predicted": "not compared: no held-out prompts were asked" if predicted is None else round(predicted, 4),
        "speed-up, prefill included": report["speedup"],
        "break-even acceptance length": report["break_even_accept_length"],
        "tokens/s with draft, all repeats": report["speculative"]["tokens_per_s"],
        "tokens/s without, all repeats": report["baseline"]["tokens_per_s"],
    }
    lengths = [length for length in prompts["accept_length"].tolist() if not math.isnan(length)]
    least = {"gate": params.gates.min_accept_length}
    return Gate(
        _tables(report, prompts, params, lossless),
        figures,
        histograms=[
            Histogram("Acceptance length an answer", lengths, "tokens a round", least),
            Histogram("Speed-up an answer", prompts["speedup"].tolist(), "times the plain server", {"even": 1.0}),
        ],
        comparison=compare(report, params.gates),
    )


def _tables(report: dict[str, Any], prompts: pd.DataFrame, params: Params, lossless: Severity) -> list[Table]:
    gates, predicted = params.gates, report["predicted_accept_length"] is not None
    return [
        Table(
            "figures",
            "benchmark",
            _figures(report, prompts),
            suite.figure_suite(gates, lossless, predicted=predicted, prompts=prompts["prompt"].nunique()),
        ),
        Table("prompts", "answer", prompts, suite.prompt_suite(lossless)),
        Table("survival", "position", _survival(report), suite.survival_suite(), shown=("id", "survival")),
        *cell_tables(report["cells"], params.target.dtype, params.serve.num_steps),
        Table(
            "domains",
            "domain",
            _domains(report),
            suite.domain_suite(gates),
            shown=("id", "accept_length", "speedup"),
        ),
        Table(
            "context lengths",
            "bucket",
            _buckets(report),
            suite.bucket_suite(),
            shown=("id", "answers", "verify_rounds", "accept_length"),
        ),
        Table(
            "settings",
            "setting",
            pd.DataFrame(_settings(report, prompts, params)),
            suite.setting_suite(),
            shown=("id", "measured", "expected"),
        ),
    ]


def _prompts() -> pd.DataFrame:
    frame = read_answers()
    parted = frame["first_difference"]
    return frame.assign(
        id=[f"{prompt}, repeat {repeat:g}" for prompt, repeat in zip(frame["prompt"], frame["repeat"], strict=True)],
        identical=parted.isna(),
        detail=[
            f"in {domain}" + ("" if pd.isna(at) else f", parts at token {at:.0f}")
            for domain, at in zip(frame["domain"], parted, strict=True)
        ],
    )


def _figures(report: dict[str, Any], prompts: pd.DataFrame) -> pd.DataFrame:
    speculative, predicted = report["speculative"], report["predicted_accept_length"]
    length, speedup = speculative["accept_length"], report["speedup"]
    counted = [speculative, {name: prompts[name].sum() for name in _COUNTS}, _sum(headline_cells(report))]
    in_table = headline_cell(report)
    pooled = [accept_length(counts["correct_drafts"], counts["verify_rounds"]) for counts in counted]
    row = {
        "id": "all prompts",
        "lossless": report["lossless"],
        "verify_rounds": speculative["verify_rounds"],
        "accept_length": length,
        "accept_length_error": max(abs(length - other) for other in pooled),
        "survival_error": abs(1 + sum(report["survival"]) - length),
        "table_error": _apart(report, in_table),
        "same_beginning": _same_beginning(prompts),
        "speedup": speedup,
        "speedup_over_accept_length": speedup / length,
        "speedup_over_accept_length_terms": f"{show(speedup)} / {show(length)}",
        "break_even_accept_length": report["break_even_accept_length"],
        "difference_from_predicted": abs(length / predicted - 1) if predicted else None,
        "difference_from_predicted_terms": f"|{show(length)} / {show(predicted)} - 1|" if predicted else None,
        "detail": f"speed-up {show(speedup)}, acceptance length served {show(length)}"
        + (f", predicted {show(predicted)}" if predicted else ""),
    }
    return pd.DataFrame([row])


def _apart(report: dict[str, Any], cell: dict[str, Any]) -> float:
    """The most by which a figure of the report differs from its cell's."""
    pairs = [
        *((report[name], cell[name]) for name in _REPEATED),
        (report["speculative"]["tokens_per_s"], cell["tokens_per_s"]["pooled"]),
        (report["baseline"]["tokens_per_s"], cell["baseline_tokens_per_s"]["pooled"]),
        *zip_longest(report["survival"], cell["survival"], fillvalue=math.inf),
    ]
    return max(abs(one - other) for one, other in pairs)


def _same_beginning(prompts: pd.DataFrame) -> float:
    """Share of the answers' first tokens, of the longer one's of each pair, that stand before the first difference."""
    beginnings = prompts[["answer_tokens", "baseline_tokens"]].max(axis=1).clip(1, _BEGINNING)
    return float((prompts["first_difference"].fillna(_BEGINNING).clip(0, beginnings)).sum() / beginnings.sum())


def _sum(cells: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(cell[name] for cell in cells) for name in _COUNTS}


def _survival(report: dict[str, Any]) -> pd.DataFrame:
    survival = report["survival"]
    return pd.DataFrame(
        {
            "id": f"draft token {position}",
            "survival": share,
            "rise": share - (survival[position - 2] if position > 1 else 1.0),
        }
        for position, share in enumerate(survival, 1)
    )


def _domains(report: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(
        {"id": row["domain"], "accept_length": row["accept_length"], "speedup": row["speedup"]}
        for row in report["by_domain"]
    )


def _buckets(report: dict[str, Any]) -> pd.DataFrame:
    """Context lengths in ascending order; `left` is the share of the shortest's AL - 1, of the shortest that was judged."""
    rows: Sequence[dict[str, Any]] = report["by_context"]
    counted = [row for row in rows if row["verify_rounds"] >= _MIN_ROUNDS]
    first = counted[0] if counted else None

    def left(row: dict[str, Any]) -> float:
        if row not in counted or first["accept_length"] <= 1:
            return 1.0
        return (row["accept_length"] - 1) / (first["accept_length"] - 1)

    return pd.DataFrame(
        {
            "id": f"{row['tokens']} tokens",
            "answers": row["answers"],
            "verify_rounds": row["verify_rounds"],
            "accept_length": row["accept_length"],
            "left": left(row),
            "detail": f"acceptance length {show(row['accept_length'])} in {row['verify_rounds']} rounds"
            + (f", and {show(first['accept_length'])} at {first['tokens']} tokens" if first else ""),
        }
        for row in rows
    )


def _settings(report: dict[str, Any], prompts: pd.DataFrame, params: Params) -> Iterator[dict[str, str]]:
    """Each setting as it was measured and as it is now, what the two files say of each other, and the cells that there must be."""
    asked, measured = params.benchmark, report["settings"]
    others = {cell["draft"] for cell in report["cells"]} - {OURS}
    pairs = {
        "target": (measured.get("target"), params.target.model),
        **{name: (measured.get(name), now) for name, now in identities().items()},
        "device": (measured.get("device"), params.target.device),
        "dtype": (measured.get("dtype"), params.target.dtype),
        "version": (measured.get("version"), version("sglang")),
        "steps": (measured.get("steps"), params.serve.num_steps),
        "topk": (measured.get("topk"), params.serve.eagle_topk),
        "draft_tokens": (measured.get("draft_tokens"), params.serve.num_draft_tokens),
        "num_prompts": (measured.get("num_prompts"), asked.num_prompts),
        "max_new_tokens": (measured.get("max_new_tokens"), asked.max_new_tokens),
        "repeats": (measured.get("repeats"), asked.repeats),
        "concurrency": (measured["concurrency"], list(asked.concurrency)),
        "temperatures": (measured["temperatures"], list(asked.temperatures)),
        "sets": (sorted(measured["sets"]), sorted(asked.sets) or [HELDOUT]),
        "drafts": (sorted(others), sorted(asked.drafts)),
        "params_sha256": (_sections(measured.get("params_sha256")), _sections(params_sha256(params))),
        "prediction": (
            _asked(predicted=report["predicted_accept_length"] is not None),
            _asked(predicted=not asked.sets),
        ),
        "prompts_sha256": (measured["prompts_sha256"], sha256_json(sorted(set(prompts["prompt"])))),
        "answers": (headline_cell(report)["requests"], len(prompts)),
    }
    for name, (found, expected) in pairs.items():
        yield {"id": name, "measured": "absent" if found is None else str(found), "expected": str(expected)}
    wanted, there = _cells_of(measured, (OURS, *others)), Counter(map(cell_name, report["cells"]))
    yield {"id": "cells", "measured": str(there.total()), "expected": str(len(wanted))}
    for name in sorted((wanted | there.keys()) - {name for name in wanted if there[name] == 1}):
        yield {"id": f"cell {name}", "measured": f"{there[name]} times", "expected": f"{int(name in wanted)} times"}


def _asked(*, predicted: bool) -> str:
    return "of held-out prompts" if predicted else "none"


def _sections(sha256: str | None) -> str | None:
    return sha256 and f"sections benchmark and serve with SHA-256 {sha256[:12]}…"


def _cells_of(measured: dict[str, Any], drafts: Sequence[str]) -> set[str]:
    """Names of the cells of these settings: every draft, set, concurrency and temperature, and several sets pooled."""
    sets = [*measured["sets"], *([POOLED] if len(measured["sets"]) > 1 else [])]
    return {
        cell_name({"draft": draft, "set": of_set, "concurrency": concurrency, "temperature": temperature})
        for draft in drafts
        for of_set in sets
        for concurrency, temperature in asked_at(measured["concurrency"], measured["temperatures"])
    }
