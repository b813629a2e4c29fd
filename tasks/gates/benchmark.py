"""Gate on the benchmark: acceptance high enough, speculation proven on, text unchanged, and figures that can be true."""

import math
from typing import Any, Literal

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json
from tasks.common.params import Gates, Params
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, because

Severity = Literal["critical", "warning"]
LEAD = (
    "After benchmark: the served draft is accepted as often as gates.min_accept_length asks and as training predicted, the "
    "text is what the target writes alone, and no figure is better than it can be."
)
REPORT, PROMPTS = REPORTS / "benchmark.json", REPORTS / "benchmark_prompts.csv"
_AGAIN = "Measure again: `dvc repro --force --single-item benchmark`."
# A round costs at least one plain step, so a speed-up above the acceptance length is a slow baseline; 5 % is noise.
_MAX_SPEEDUP_OVER_ACCEPT_LENGTH = 1.05
# Served acceptance against the prediction from held-out answers.
_WARN_DIFFERENCE, _MAX_DIFFERENCE = 0.10, 0.25
# Figures in the report have four decimals.
_ROUNDING = 0.001


def build(params: Params) -> Gate:
    """Read reports/benchmark.json and benchmark_prompts.csv.

    Raises:
        DraftlineError: a report is absent, or benchmark.json lacks a figure.
    """
    report, prompts = read_json(REPORT), _prompts()
    lossless: Severity = "critical" if params.target.dtype == "float32" else "warning"
    try:
        tables = [
            Table("figures", "benchmark", _figures(report, prompts), figure_suite(params.gates, lossless)),
            Table(
                "prompts",
                "answer",
                prompts,
                prompt_suite(lossless),
            ),
            Table("survival", "position", _survival(report), survival_suite(), shown=("id", "survival")),
            Table(
                "domains",
                "domain",
                _domains(report),
                domain_suite(params.gates),
                shown=("id", "accept_length", "speedup"),
            ),
            Table(
                "settings", "setting", _settings(report, params), setting_suite(), shown=("id", "measured", "expected")
            ),
        ]
        figures = {
            "acceptance length": report["speculative"]["accept_length"],
            "predicted": report["predicted_accept_length"],
            "speed-up": report["speedup"],
            "tokens/s with draft": report["speculative"]["tokens_per_s"],
            "tokens/s without": report["baseline"]["tokens_per_s"],
        }
    except KeyError as error:
        raise DraftlineError(f"{REPORT}: no {error}. It was written by another version. {_AGAIN}") from None
    lengths = [length for length in prompts["accept_length"].tolist() if not math.isnan(length)]
    return Gate(
        tables,
        figures,
        histograms=[
            Histogram(
                "Acceptance length an answer", lengths, "tokens a round", {"gate": params.gates.min_accept_length}
            ),
            Histogram("Speed-up an answer", prompts["speedup"].tolist(), "times the plain server", {"even": 1.0}),
        ],
    )


def figure_suite(gates: Gates, lossless: Severity) -> list[gxe.Expectation]:
    """What must hold of the pooled figures.

    Args:
        lossless: severity of a text that differs; in half precision greedy text may differ between batch shapes.
    """
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="lossless",
            value_set=[True],
            severity=lossless,
            description="Every text is the one that the target writes alone",
            meta=because(
                "S7", "Verification accepts only what the target would have written: a difference is a defect.", _AGAIN
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="verify_rounds",
            min_value=1,
            severity="critical",
            description="The server verified drafts",
            meta=because(
                "S4", "An acceptance length of 1 is also what a server reports that never speculates.", _AGAIN
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="accept_length",
            min_value=gates.min_accept_length,
            severity="critical",
            description="Acceptance length is at least gates.min_accept_length",
            meta=because(
                "S10",
                "A draft that is seldom right costs more than it saves.",
                "Train longer or on more answers (train_draft.max_steps, prompts.folder), or lower gates.min_accept_length.",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="accept_length_error",
            max_value=_ROUNDING,
            severity="critical",
            description="Acceptance length is 1 + correct drafts / rounds, from the report's counts and from its prompts",
            meta=because("S5", "A mean of ratios, or one without the bonus token, compares with nothing.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="survival_error",
            max_value=_ROUNDING,
            severity="critical",
            description="Survival over the positions sums to acceptance length - 1",
            meta=because(
                "S5", "Two figures of one measurement that disagree: one of them is another measurement's.", _AGAIN
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="The speed-up is a positive number",
            meta=because("S6", "A server that answered nothing has no speed.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup_over_accept_length",
            max_value=_MAX_SPEEDUP_OVER_ACCEPT_LENGTH,
            severity="critical",
            description="The speed-up is not above the acceptance length",
            meta=because(
                "S6",
                "A round costs at least a plain step: a higher speed-up comes from a slow baseline, cold or with other flags.",
                f"Raise benchmark.warmup_prompts and benchmark.repeats, and keep the machine idle. {_AGAIN}",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup",
            min_value=1,
            severity="warning",
            description="The server is faster with the draft than without",
            meta=because(
                "S9",
                "Below the break-even acceptance length (in the report) speculation slows the server.",
                "Train longer.",
            ),
        ),
        *(
            gxe.ExpectColumnValuesToBeBetween(
                column="difference_from_predicted",
                max_value=limit,
                severity=severity,
                description=f"Served acceptance length is within {limit:.0%} of the prediction",
                meta=because(
                    "C3",
                    "The prediction walks held-out answers as a server does: a gap is the server reading the draft otherwise.",
                    "See the parity check of launch_server (reports/launch_server.json). With few prompts it may be chance: "
                    "raise benchmark.num_prompts.",
                ),
            )
            for limit, severity in ((_WARN_DIFFERENCE, "warning"), (_MAX_DIFFERENCE, "critical"))
        ),
    ]


def prompt_suite(lossless: Severity) -> list[gxe.Expectation]:
    """What must hold of each answer."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="identical",
            value_set=[True],
            severity=lossless,
            description="The text with the draft is the plain greedy text",
            meta=because("S7", "Here is where they part; in float32 no rounding excuses it.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speculative_tokens_per_s",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="Every prompt was answered with the draft",
            meta=because("S6", "Speeds over different prompts do not compare.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="baseline_tokens_per_s",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="Every prompt was answered without the draft",
            meta=because("S6", "Speeds over different prompts do not compare.", _AGAIN),
        ),
    ]


def survival_suite() -> list[gxe.Expectation]:
    """What must hold of each draft position."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="survival",
            min_value=0,
            max_value=1,
            severity="critical",
            description="Survival is a share of the rounds",
            meta=because("S5", "It is the chance that draft tokens 1..i are all right.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="rise",
            max_value=0,
            severity="critical",
            description="Survival never rises with the position",
            meta=because("S5", "A chain that is right up to a later token is right up to the earlier ones.", _AGAIN),
        ),
    ]


def domain_suite(gates: Gates) -> list[gxe.Expectation]:
    """What is expected of each domain."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="accept_length",
            min_value=gates.min_accept_length,
            severity="warning",
            description="Acceptance length is at least gates.min_accept_length in every domain",
            meta=because("S10", "A mean hides a domain that the draft never learned.", "Add prompts of that domain."),
        )
    ]


def setting_suite() -> list[gxe.Expectation]:
    """What must hold of each setting."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="measured",
            column_B="expected",
            severity="critical",
            description="The figures were measured with the settings of params.yaml",
            meta=because(
                "S5", "An acceptance length without its steps, top-k and draft tokens compares with nothing.", _AGAIN
            ),
        )
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
    pooled = [
        _accept_length(speculative["correct_drafts"], speculative["verify_rounds"]),
        _accept_length(prompts["correct_drafts"].sum(), prompts["verify_rounds"].sum()),
    ]
    row = {
        "id": "all prompts",
        "lossless": report["lossless"],
        "verify_rounds": speculative["verify_rounds"],
        "accept_length": length,
        "accept_length_error": max(abs(length - other) for other in pooled),
        "survival_error": abs(1 + sum(report["survival"]) - length),
        "speedup": speedup,
        "speedup_over_accept_length": speedup / length,
        "difference_from_predicted": abs(length / predicted - 1),
        "detail": f"served {length}, predicted {predicted}",
    }
    return pd.DataFrame([row])


def _accept_length(correct: float, rounds: float) -> float:
    return 1 + correct / rounds if rounds else math.inf  # a NaN would pass for a missing value


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


def _settings(report: dict[str, Any], params: Params) -> pd.DataFrame:
    expected = {
        "steps": params.serve.num_steps,
        "topk": params.serve.eagle_topk,
        "draft_tokens": params.serve.num_draft_tokens,
        "max_new_tokens": params.benchmark.max_new_tokens,
        "repeats": params.benchmark.repeats,
        "dtype": params.target.dtype,
    }
    measured = report["settings"]
    return pd.DataFrame(
        {"id": name, "measured": str(measured.get(name, "absent")), "expected": str(value)}
        for name, value in expected.items()
    )
