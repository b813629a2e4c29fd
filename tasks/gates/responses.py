"""Gate on responses: the target's own answers, whole, one a prompt, with the token ids that it saw and wrote."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.files import read_json, read_jsonl, sha256_json
from tasks.common.params import Gates, Params
from tasks.common.progress import progress
from tasks.common.prompts import read_prompts
from tasks.common.responses import RESPONSES, SPLITS, Response, read_responses
from tasks.common.target import TARGET, TargetShape, load_config, load_tokenizer, render_prompt, stop_token_ids
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, because

LEAD = (
    "Between regenerate_responses and dump_hidden_states: every prompt has exactly one answer, written by this very target "
    "and kept as the token ids that it saw and generated."
)
_STOPPED, _CUT = "stop, at a stop token", "length, without one"
# `--force` would take over the answers that are there.
_AGAIN = "Answer again: delete artifacts/responses, then `dvc repro`."
_ANSWER_COLUMNS = (
    "id",
    "asked",
    "prompt_tokens",
    "output_tokens",
    "ids_outside_vocabulary",
    "prompt_difference",
    "text_is_decoded",
    "empty",
    "end",
    "finish_reason",
    "repeated_share",
    "detail",
)


def build(params: Params) -> Gate:
    """Read artifacts/responses beside the prompts, render each prompt again and decode each answer again.

    Raises:
        DraftlineError: a file is absent or a line is not a response; names file and line.
    """
    manifest = read_json(RESPONSES / "manifest.json")
    asked = {prompt.id: (split, sha256_json(prompt.messages)) for split in SPLITS for prompt in read_prompts(split)}
    failures = {row["id"]: row["reason"] for row in read_jsonl(RESPONSES / "failures.jsonl")}
    rows = progress(_answers(asked), total=len(asked), desc="gate responses", unit="answer")
    answers = pd.DataFrame(rows, columns=_ANSWER_COLUMNS)
    cut = int((answers["finish_reason"] == "length").sum())
    return Gate(
        tables=[
            Table("prompts", "prompt", _prompts(asked, answers, failures), prompt_suite(params.gates)),
            Table("answers", "answer", answers, answer_suite(params)),
            Table(
                "provenance", "fact", _provenance(manifest, params, answers, failures), provenance_suite(), shown=_FACTS
            ),
        ],
        figures={
            "answers": len(answers),
            "prompts without one": len(failures),
            "generated tokens": int(answers["output_tokens"].sum()),
            "cut at the limit": f"{cut / max(len(answers), 1):.1%}",
        },
        histograms=[
            Histogram("Tokens an answer", answers["output_tokens"].tolist(), "tokens"),
            Histogram("Tokens a prompt", answers["prompt_tokens"].tolist(), "tokens"),
            Histogram("Repeated 4-grams an answer", answers["repeated_share"].tolist(), "share"),
        ],
    )


_FACTS = ("id", "recorded", "expected")


def prompt_suite(gates: Gates) -> list[gxe.Expectation]:
    """What must hold of each prompt that was asked."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="records",
            value_set=[1],
            severity="critical",
            description="Every prompt has exactly one answer or one recorded failure",
            meta=because("R1", "A resumed run that counts lines loses some prompts and answers others twice.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="answered",
            value_set=[True],
            mostly=1 - gates.max_failed_share,
            severity="critical",
            description=_at_most(gates, "max_failed_share", "of the prompts have no answer"),
            meta=because(
                "R3",
                "Prompts that fail are seldom a fair sample of all: the draft never sees their kind.",
                "artifacts/responses/failures.jsonl has the reasons; `dvc repro --force --single-item regenerate_responses` "
                "tries those again.",
            ),
        ),
    ]


def answer_suite(params: Params) -> list[gxe.Expectation]:
    """What must hold of each answer."""
    gates = params.gates
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="asked",
            value_set=[True],
            severity="critical",
            description="Every answer belongs to a prompt of its split, word for word",
            meta=because("D9", "Answers to prompts that have since changed are stale.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="empty",
            value_set=[False],
            severity="critical",
            description="No answer is empty",
            meta=because("R4", "An empty answer counts as success and teaches nothing.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="output_tokens",
            min_value=1,
            max_value=params.regenerate.max_new_tokens,
            severity="critical",
            description="An answer has between one token and regenerate.max_new_tokens",
            meta=because("D9", "Longer answers were made under other settings.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="ids_outside_vocabulary",
            value_set=[0],
            severity="critical",
            description="Every token id is in the target's vocabulary",
            meta=because("D6", "Ids of another tokenizer look like numbers all the same.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="prompt_difference",
            value_set=[""],
            severity="critical",
            description="The prompt's token ids are those of its messages under the target's template",
            meta=because(
                "D4",
                "A system prompt or thinking tag that the template adds in one place and not in another shifts everything.",
                f"Was the chat template changed after the answers were made? {_AGAIN}",
            ),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="text_is_decoded",
            value_set=[True],
            severity="critical",
            description="The text is what its token ids decode to",
            meta=because(
                "D6", "Text and ids that differ were not made together; tokenizing text again gives other ids.", _AGAIN
            ),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="end",
            value_set=[_STOPPED, _CUT],
            severity="critical",
            description="The finish reason agrees with the last token: stop at a stop token, else length",
            meta=because("D7", "Cut answers that pass as whole teach the draft to end nowhere.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="finish_reason",
            value_set=["stop"],
            mostly=1 - gates.max_truncated_share,
            severity="critical",
            description=_at_most(gates, "max_truncated_share", "of the answers were cut at the limit"),
            meta=because(
                "D7",
                "A draft that is trained on beginnings alone is never asked about ends.",
                "Raise regenerate.max_new_tokens, or allow more in gates.max_truncated_share.",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="repeated_share",
            max_value=0.8,
            severity="warning",
            description="No answer says the same over and over (4-grams that repeat an earlier one: at most 0.8)",
            meta=because(
                "R4",
                "A loop is easy to predict: it flatters acceptance and crowds out real text.",
                "Read these answers. Small targets loop under greedy decoding; a temperature above 0 helps.",
            ),
        ),
    ]


def _at_most(gates: Gates, limit: str, what: str) -> str:
    """The sentence of a share; where all is allowed it cannot fail, and says so."""
    share = getattr(gates, limit)
    return f"At most gates.{limit} {what}" if share < 1 else f"No limit set on how many {what} (gates.{limit}: {share})"


def provenance_suite() -> list[gxe.Expectation]:
    """What must hold of each fact in the manifest."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="recorded",
            column_B="expected",
            severity="critical",
            description="The answers were made by this target, with this tokenizer and these settings, and all are here",
            meta=because("D3", "Answers of another model have another distribution: the draft learns to miss.", _AGAIN),
        )
    ]


def _answers(asked: dict[str, tuple[str, str]]) -> Iterator[dict[str, Any]]:
    tokenizer, stops = load_tokenizer(), set(stop_token_ids())
    vocabulary = TargetShape.of(load_config()).vocab_size
    for split in SPLITS:
        for response in read_responses(split):
            output = response.output_token_ids
            stopped = bool(output) and output[-1] in stops
            yield {
                "id": response.id,
                "asked": asked.get(response.id) == (split, sha256_json(response.messages)),
                "prompt_tokens": len(response.prompt_token_ids),
                "output_tokens": len(output),
                "ids_outside_vocabulary": sum(not 0 <= token < vocabulary for token in response.token_ids),
                "prompt_difference": _difference(
                    response.prompt_token_ids, render_prompt(tokenizer, response.messages)
                ),
                "text_is_decoded": _decodes(tokenizer, response, vocabulary),
                "empty": not response.text.strip(),
                "end": f"{response.finish_reason}, {'at a stop token' if stopped else 'without one'}",
                "finish_reason": response.finish_reason,
                "repeated_share": _repeated_share(output),
                "detail": f"in {split}",
            }


def _difference(stored: list[int], rendered: list[int]) -> str:
    """Where two lists of ids part, or nothing."""
    if stored == rendered:
        return ""
    at = next(
        (i for i, (a, b) in enumerate(zip(stored, rendered, strict=False)) if a != b), min(len(stored), len(rendered))
    )
    return f"from position {at}: stored {stored[at : at + 3]}, template {rendered[at : at + 3]}"


def _decodes(tokenizer, response: Response, vocabulary: int) -> bool:
    if not all(0 <= token < vocabulary for token in response.output_token_ids):
        return False
    return tokenizer.decode(response.output_token_ids, skip_special_tokens=True) == response.text


def _repeated_share(ids: list[int], n: int = 4) -> float:
    """Share of an answer's n-grams that occurred in it before; 0 for one too short to have any."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _prompts(asked: dict[str, tuple[str, str]], answers: pd.DataFrame, failures: dict[str, str]) -> pd.DataFrame:
    answered = Counter(answers["id"])
    return pd.DataFrame(
        {
            "id": prompt_id,
            "records": answered[prompt_id] + (prompt_id in failures),
            "answered": answered[prompt_id] > 0,
            "detail": f"in {split}" + (f", failed: {failures[prompt_id]}" if prompt_id in failures else ""),
        }
        for prompt_id, (split, _) in asked.items()
    )


def _provenance(
    manifest: dict[str, Any], params: Params, answers: pd.DataFrame, failures: dict[str, str]
) -> pd.DataFrame:
    identity = read_json(TARGET / "draftline.json")
    sampling = params.regenerate.model_dump(exclude={"batch_size"})
    splits = manifest.get("splits", {}).values()
    facts = [
        ("target_sha256", manifest.get("target_sha256"), identity["target_sha256"]),
        ("tokenizer_sha256", manifest.get("tokenizer_sha256"), identity["tokenizer_sha256"]),
        ("dtype", manifest.get("dtype"), params.target.dtype),
        *((f"sampling.{key}", manifest.get("sampling", {}).get(key), value) for key, value in sampling.items()),
        ("answers", sum(split.get("answers", 0) for split in splits), len(answers)),
        ("failed", sum(split.get("failed", 0) for split in splits), len(failures)),
    ]
    return pd.DataFrame(
        {"id": name, "recorded": "absent" if recorded is None else str(recorded), "expected": str(expected)}
        for name, recorded, expected in facts
    )
