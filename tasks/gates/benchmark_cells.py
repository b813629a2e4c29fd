"""What every cell of a benchmark must hold: a draft on a set, at a concurrency and a temperature, beside the plain server."""

import math
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.benchmark_names import OURS
from tasks.common.params import Dtype
from tasks.gates.benchmark_suite import AGAIN, MAX_SPEEDUP_OVER_ACCEPT_LENGTH, ROUNDING, Severity
from tasks.gates.suite import Table, because, show

_SHOWN = (
    "id",
    "accept_length",
    "break_even_accept_length",
    "speedup",
    "slowest",
    "tokens_per_s",
    "fastest",
    "agreement",
)
_MIN_PASSES = 3
# Of a cell's answers so many may part from the plain server's in float32: requests that run at once are added up in another
# order, and where two tokens are all but equally likely that decides. Above it is no rounding.
_WARN_DIFFERING, _MAX_DIFFERING = 0.0, 0.1


def cell_tables(cells: list[dict[str, Any]], dtype: Dtype, steps: int) -> list[Table]:
    """Ours, whose breach fails the gate, and those of other people's drafts, if any: they are not the run's fault."""
    ours = pd.DataFrame(_row(cell, steps) for cell in cells if cell["draft"] == OURS)
    others = pd.DataFrame(_row(cell, steps) for cell in cells if cell["draft"] != OURS)
    tables = [Table("cells", "cell", ours, cell_suite("critical", dtype), shown=_SHOWN)]
    if len(others):
        tables.append(Table("cells of other drafts", "cell", others, cell_suite("warning", dtype), shown=_SHOWN))
    return tables


def cell_suite(severity: Severity, dtype: Dtype) -> list[gxe.Expectation]:
    """
    Args:
        severity: of what cannot be true.
        dtype: the target's; in half precision greedy text differs between batch shapes, and nothing is expected of it.
    """
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="verify_rounds",
            min_value=1,
            severity=severity,
            description="The server verified drafts in every cell",
            meta=because("S4", "An acceptance length of 1 is also what a server reports that never speculates.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="accept_length_error",
            max_value=ROUNDING,
            severity=severity,
            description="Every cell's acceptance length is 1 + correct drafts / rounds, and its survival sums to it",
            meta=because("S5", "Of another definition, or of another measurement, it compares with nothing.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="survival_falls",
            value_set=[True],
            severity=severity,
            description="Every cell's survival has a share for each draft step, and none above the one before",
            meta=because("S5", "A chain that is right up to a later token is right up to the earlier ones.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="speedup_is_the_ratio",
            value_set=[True],
            severity=severity,
            description="Every cell's speed-up is the ratio of its tokens per second",
            meta=because("S6", "A speed-up of other speeds than those beside it is another measurement's.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup_over_accept_length",
            max_value=MAX_SPEEDUP_OVER_ACCEPT_LENGTH,
            severity=severity,
            description=f"Every cell's speed-up / acceptance length is at most {MAX_SPEEDUP_OVER_ACCEPT_LENGTH}",
            meta=because(
                "S6",
                "A round costs at least a plain step: a higher speed-up comes from a slow baseline, cold or with other flags.",
                f"Raise benchmark.warmup_prompts and benchmark.repeats, and keep the machine idle. {AGAIN}",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="break_even_accept_length",
            min_value=0,
            strict_min=True,
            severity=severity,
            description="Every cell's break-even acceptance length was measured",
            meta=because("S9", "Without it nobody can say why a server is slower, or what is missing.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="passes",
            min_value=_MIN_PASSES,
            severity=severity,
            description=f"Every cell was measured in at least {_MIN_PASSES} passes",
            meta=because("S6", "Without a spread nobody can tell a difference from noise.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="speed_in_spread",
            value_set=[True],
            severity=severity,
            description="Every cell's speeds are within the spread of its passes",
            meta=because(
                "S6",
                "All passes together, their median, the slowest and the fastest are one measurement's: these are of several.",
                AGAIN,
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup",
            min_value=1,
            severity="warning",
            description="The server is faster with the draft than without in every cell",
            meta=because(
                "S9",
                "Below the break-even acceptance length, which a round over a plain step is, speculation slows the server. It rises "
                "with the requests at once: verification then competes with them.",
                "Train longer, or draft fewer steps where so many requests run at once (serve.num_steps).",
            ),
        ),
        *(_text_suite(severity) if dtype == "float32" else []),
    ]


def _text_suite(severity: Severity) -> list[gxe.Expectation]:
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="differing_answers",
            max_value=limit,
            severity=of_limit,
            description=f"{f'At most {limit:.0%}' if limit else 'None'} of a cell's greedy answers differ from the plain server's",
            meta=because(
                "S7",
                "In float32 requests that run at once change a text only where two tokens are all but equally likely.",
                AGAIN,
            ),
        )
        for limit, of_limit in ((_WARN_DIFFERING, "warning"), (_MAX_DIFFERING, severity))
    ]


def cell_name(cell: dict[str, Any]) -> str:
    """'heldout, 4 at once, temperature 0' of ours, with the draft's name before it of another."""
    whose = "" if cell["draft"] == OURS else f"{cell['draft']}: "
    return f"{whose}{cell['set']}, {cell['concurrency']} at once, temperature {str(cell['temperature']).removesuffix('.0')}"


def accept_length(correct: float, rounds: float) -> float:
    """As the contract defines it; infinite without a round, since a NaN would pass for a missing value."""
    return 1 + correct / rounds if rounds else math.inf


def _is_ratio(speedup: float, drafted: float, plain: float) -> bool:
    """Whether a speed-up of three decimals can be that of two speeds of two."""
    low, high = max(drafted - 0.005, 0) / (plain + 0.005), (drafted + 0.005) / max(plain - 0.005, 1e-9)
    return low - ROUNDING <= speedup <= high + ROUNDING


def _row(cell: dict[str, Any], steps: int) -> dict[str, Any]:
    length, rounds, agreement = cell["accept_length"], cell["verify_rounds"], cell["agreement"]
    drafted, plain = cell["tokens_per_s"], cell["baseline_tokens_per_s"]
    shares = [1.0, *cell["survival"], 0.0]
    expected = (accept_length(cell["correct_drafts"], rounds), 1 + sum(cell["survival"]))
    return {
        "id": cell_name(cell),
        "verify_rounds": rounds,
        "accept_length": length,
        "accept_length_error": max(abs(length - other) for other in expected),
        "survival_falls": len(cell["survival"]) == steps and shares == sorted(shares, reverse=True),
        "break_even_accept_length": cell["break_even_accept_length"],
        "speedup": cell["speedup"],
        "speedup_is_the_ratio": _is_ratio(cell["speedup"], drafted["pooled"], plain["pooled"]),
        "speedup_over_accept_length": cell["speedup"] / length,
        "speedup_over_accept_length_terms": f"{show(cell['speedup'])} / {show(length)}",
        "slowest": drafted["min"],
        "tokens_per_s": drafted["pooled"],
        "fastest": drafted["max"],
        "passes": cell["repeats"],
        "speed_in_spread": all(
            each["min"] <= each[of_all] <= each["max"] for each in (drafted, plain) for of_all in ("pooled", "median")
        ),
        "agreement": agreement,
        "differing_answers": 0.0 if agreement is None else 1 - agreement,
        "detail": f"speed-up {show(cell['speedup'])}, acceptance length {show(length)}, break-even {show(cell['break_even_accept_length'])}, "
        f"{show(drafted['pooled'])} tokens/s against {show(plain['pooled'])}",
    }
