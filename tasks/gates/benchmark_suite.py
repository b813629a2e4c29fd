"""What a benchmark must hold, table by table, with the reason and the fix of each."""

from typing import Literal

import great_expectations.expectations as gxe

from tasks.common.params import Gates
from tasks.gates.suite import because

Severity = Literal["critical", "warning"]
AGAIN = "Measure again: `dvc repro --force --single-item benchmark`."
# A round costs at least one plain step, so a speed-up above the acceptance length is a slow baseline; 5 % is noise.
MAX_SPEEDUP_OVER_ACCEPT_LENGTH = 1.05
# Served acceptance against the prediction from held-out answers.
_WARN_DIFFERENCE, _MAX_DIFFERENCE = 0.10, 0.25
# Figures in the report have four decimals.
ROUNDING = 0.001
# Of the shortest contexts' AL - 1 what must be left in longer ones.
_MIN_LEFT = 0.5
# In any type, of the answers' beginnings. Verification that is broken, or an acceptance that is made up, parts from the plain server
# at the second token, the first that was drafted: 4 % of 24 tokens (bfloat16, SGLANG_SIMULATE_ACC_LEN). Rounding parts seldom: on an
# H200 in bfloat16 47 % of the tokens of whole answers, of up to 256, stood before the first difference.
_MIN_SAME_BEGINNING = 0.25
# Parted as often as there, one sound answer alone falls below in 5 % of the benchmarks, two in 0.6 %, 16 in none of 20,000.
_ENOUGH_PROMPTS = 2
_DISAGREE = because("S5", "Two figures of one measurement that disagree: one of them is another measurement's.", AGAIN)


def figure_suite(gates: Gates, lossless: Severity, *, predicted: bool, prompts: int) -> list[gxe.Expectation]:
    """What must hold of the pooled figures.

    Args:
        lossless: severity of a text that differs; in half precision greedy text may differ between batch shapes.
        predicted: whether held-out prompts were asked, for which training predicted the acceptance length.
        prompts: different ones that were answered.
    """
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="lossless",
            value_set=[True],
            severity=lossless,
            description="Every text is the one that the target writes alone",
            meta=because(
                "S7", "Verification accepts only what the target would have written: a difference is a defect.", AGAIN
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="same_beginning",
            min_value=_MIN_SAME_BEGINNING,
            severity="critical" if prompts >= _ENOUGH_PROMPTS else "warning",
            description=f"Of the answers' first tokens {_MIN_SAME_BEGINNING:.0%} stand before the first difference, in any type",
            meta=because(
                "S7",
                "Rounding changes few tokens: a text that parts at once from the plain server's was not verified by the target.",
                f"See that nothing makes acceptance up (SGLANG_SIMULATE_ACC_LEN, serve.extra_args). {AGAIN}",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="verify_rounds",
            min_value=1,
            severity="critical",
            description="The server verified drafts",
            meta=because("S4", "An acceptance length of 1 is also what a server reports that never speculates.", AGAIN),
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
            max_value=ROUNDING,
            severity="critical",
            description="Acceptance length is 1 + correct drafts / rounds, from the report's counts, its prompts and its cells",
            meta=because("S5", "A mean of ratios, or one without the bonus token, compares with nothing.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="survival_error",
            max_value=ROUNDING,
            severity="critical",
            description="Survival over the positions sums to acceptance length - 1",
            meta=_DISAGREE,
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="table_error",
            max_value=ROUNDING,
            severity="critical",
            description="Speeds, speed-up, break-even acceptance length and survival are those of the table",
            meta=_DISAGREE,
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="The speed-up is a positive number",
            meta=because("S6", "A server that answered nothing has no speed.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speedup_over_accept_length",
            max_value=MAX_SPEEDUP_OVER_ACCEPT_LENGTH,
            severity="critical",
            description=f"Speed-up / acceptance length is at most {MAX_SPEEDUP_OVER_ACCEPT_LENGTH}",
            meta=because(
                "S6",
                "A round costs at least a plain step: a higher speed-up comes from a slow baseline, cold or with other flags.",
                f"Raise benchmark.warmup_prompts and benchmark.repeats, and keep the machine idle. {AGAIN}",
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
        gxe.ExpectColumnValuesToBeBetween(
            column="break_even_accept_length",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="The break-even acceptance length was measured",
            meta=because("S9", "Without it nobody can say why a server is slower, or what is missing.", AGAIN),
        ),
        *(_prediction_suite() if predicted else []),
    ]


def _prediction_suite() -> list[gxe.Expectation]:
    return [
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
    ]


def prompt_suite(lossless: Severity) -> list[gxe.Expectation]:
    """What must hold of each answer."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="identical",
            value_set=[True],
            severity=lossless,
            description="The text with the draft is the plain greedy text",
            meta=because("S7", "Here is where they part; in float32 no rounding excuses it.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="speculative_tokens_per_s",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="Every prompt was answered with the draft",
            meta=because("S6", "Speeds over different prompts do not compare.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="baseline_tokens_per_s",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="Every prompt was answered without the draft",
            meta=because("S6", "Speeds over different prompts do not compare.", AGAIN),
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
            meta=because("S5", "It is the chance that draft tokens 1..i are all right.", AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="rise",
            max_value=0,
            severity="critical",
            description="Survival never rises with the position",
            meta=because("S5", "A chain that is right up to a later token is right up to the earlier ones.", AGAIN),
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


def bucket_suite() -> list[gxe.Expectation]:
    """What is expected of each context length."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="left",
            min_value=_MIN_LEFT,
            severity="warning",
            description=f"Longer contexts keep {_MIN_LEFT:.0%} of the shortest contexts' acceptance length above 1",
            meta=because(
                "S8",
                "A draft is often right no further than the lengths that it was trained on.",
                "Train on longer conversations: raise prompts.max_prompt_tokens and regenerate.max_new_tokens, and bring prompts of "
                "that length.",
            ),
        )
    ]


def setting_suite() -> list[gxe.Expectation]:
    """What must hold of each setting, and of each cell that there must be."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="measured",
            column_B="expected",
            severity="critical",
            description="The figures were measured with the settings of params.yaml, in every cell once",
            meta=because(
                "S5", "A figure of other settings, or of half a measurement, says nothing of this draft.", AGAIN
            ),
        )
    ]
