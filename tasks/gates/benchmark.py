"""Gate on the benchmark: acceptance high enough and no lower than before, speculation proven on, text unchanged, and figures
that can be true."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json
from tasks.common.params import Params
from tasks.gates import benchmark_suite as suite
from tasks.gates.accepted_benchmark import compare, headline_cells
from tasks.gates.benchmark_cells import OURS, accept_length, cell_tables
from tasks.gates.benchmark_suite import AGAIN, Severity
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, show

LEAD = (
    "After benchmark: the served draft is accepted as often as gates.min_accept_length asks, as training predicted and as in the "
    "last accepted report, the text is what the target writes alone, and no figure is better than it can be."
)
REPORT, PROMPTS = REPORTS / "benchmark.json", REPORTS / "benchmark_prompts.csv"
# Of fewer rounds a bucket of context lengths is mostly chance.
_MIN_ROUNDS = 50
_COUNTS = ("correct_drafts", "verify_rounds")


def build(params: Params) -> Gate:
    """Read reports/benchmark.json and benchmark_prompts.csv, and of git's HEAD the benchmark.json that was accepted.

    Raises:
        DraftlineError: a report is absent, or benchmark.json lacks a figure.
    """
    report, prompts = read_json(REPORT), _prompts()
    lossless: Severity = "critical" if params.target.dtype == "float32" else "warning"
    try:
        tables = _tables(report, prompts, params, lossless)
        predicted = report["predicted_accept_length"]
        figures = {
            "acceptance length": report["speculative"]["accept_length"],
            "predicted": "not compared: no held-out prompts were asked" if predicted is None else round(predicted, 4),
            "speed-up, prefill included": report["speedup"],
            "break-even acceptance length": report["break_even_accept_length"],
            "tokens/s with draft, all repeats": report["speculative"]["tokens_per_s"],
            "tokens/s without, all repeats": report["baseline"]["tokens_per_s"],
        }
        comparison = compare(report, params.gates)
    except (KeyError, TypeError) as error:
        raise DraftlineError(f"{REPORT}: {_absent(error)}. It was written by another version. {AGAIN}") from None
    lengths = [length for length in prompts["accept_length"].tolist() if not math.isnan(length)]
    least = {"gate": params.gates.min_accept_length}
    return Gate(
        tables,
        figures,
        histograms=[
            Histogram("Acceptance length an answer", lengths, "tokens a round", least),
            Histogram("Speed-up an answer", prompts["speedup"].tolist(), "times the plain server", {"even": 1.0}),
        ],
        comparison=comparison,
    )


def _tables(report: dict[str, Any], prompts: pd.DataFrame, params: Params, lossless: Severity) -> list[Table]:
    gates, predicted = params.gates, report["predicted_accept_length"] is not None
    return [
        Table(
            "figures",
            "benchmark",
            _figures(report, prompts),
            suite.figure_suite(gates, lossless, predicted=predicted),
        ),
        Table("prompts", "answer", prompts, suite.prompt_suite(lossless)),
        Table("survival", "position", _survival(report), suite.survival_suite(), shown=("id", "survival")),
        *cell_tables(report["cells"], params.target.dtype),
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
            _settings(report, params),
            suite.setting_suite(),
            shown=("id", "measured", "expected"),
        ),
    ]


def _prompts() -> pd.DataFrame:
    if not PROMPTS.exists():
        raise DraftlineError(f"{PROMPTS}: not there. Run the stage that writes it: `dvc repro`.")
    frame = pd.read_csv(PROMPTS)
    parted = frame["first_difference"]
    return frame.assign(
        id=frame["prompt"] + ", repeat " + frame["repeat"].astype(str),
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
    pooled = [accept_length(counts["correct_drafts"], counts["verify_rounds"]) for counts in counted]
    row = {
        "id": "all prompts",
        "lossless": report["lossless"],
        "verify_rounds": speculative["verify_rounds"],
        "accept_length": length,
        "accept_length_error": max(abs(length - other) for other in pooled),
        "survival_error": abs(1 + sum(report["survival"]) - length),
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
        {"id": row["domain"], "accept_length": row["accept_length"], "speedup": row.get("speedup")}
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


def _settings(report: dict[str, Any], params: Params) -> pd.DataFrame:
    asked, measured = params.benchmark, report["settings"]
    others = {cell["draft"] for cell in report["cells"]} - {OURS}
    expected = {
        "steps": params.serve.num_steps,
        "topk": params.serve.eagle_topk,
        "draft_tokens": params.serve.num_draft_tokens,
        "num_prompts": asked.num_prompts,
        "max_new_tokens": asked.max_new_tokens,
        "repeats": asked.repeats,
        "concurrency": list(asked.concurrency),
        "temperatures": list(asked.temperatures),
        "sets": sorted(asked.sets) or ["heldout"],
        "drafts": sorted(asked.drafts),
        "dtype": params.target.dtype,
    }
    found = measured | {"sets": sorted(measured["sets"]), "drafts": sorted(others)}
    return pd.DataFrame(
        {"id": name, "measured": str(found.get(name, "absent")), "expected": str(value)}
        for name, value in expected.items()
    )


def _absent(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else f"a figure is of another kind ({error})"
