"""Gate on prompts: what the target is asked must be whole, short enough, and kept apart by split."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.files import read_json
from tasks.common.params import Gates, Params
from tasks.common.progress import progress
from tasks.common.prompts import PROMPTS, Prompt, read_prompts
from tasks.common.responses import SPLITS
from tasks.common.target import control_tokens, load_tokenizer, render_prompt
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, because

LEAD = (
    "Between collect_prompts and regenerate_responses: every prompt is a whole conversation that ends with a user message "
    "and fits, and no held-out prompt is trained on."
)
_ROLES = {"system", "user", "assistant"}
_COLLECT = (
    "Run `dvc repro collect_prompts`; if it comes again, correct the file of prompts.folder that holds the prompt."
)


def build(params: Params) -> Gate:
    """Read artifacts/prompts and render every prompt with the target's template.

    Raises:
        DraftlineError: a file is absent or not JSON; names file and line.
    """
    manifest = read_json(PROMPTS / "manifest.json")
    total = sum(manifest[split]["prompts"] for split in SPLITS)
    prompts = pd.DataFrame(progress(_rows(), total=total, desc="gate prompts", unit="prompt"), columns=_COLUMNS)
    return Gate(
        tables=[
            Table("prompts", "prompt", prompts, prompt_suite(params.prompts.max_prompt_tokens)),
            Table("splits", "split", _splits(manifest, prompts), split_suite(params.gates), shown=_SPLIT_COLUMNS),
        ],
        figures={
            "training prompts": int((prompts["split"] == "train").sum()),
            "held-out prompts": int((prompts["split"] == "heldout").sum()),
            "domains": int(prompts["domain"].nunique()),
            "prompt tokens": int(prompts["tokens"].sum()),
        },
        histograms=[
            Histogram(
                "Tokens a training prompt", prompts.loc[prompts["split"] == "train", "tokens"].tolist(), "tokens"
            ),
            Histogram(
                "Tokens a held-out prompt", prompts.loc[prompts["split"] == "heldout", "tokens"].tolist(), "tokens"
            ),
            Histogram("Messages a prompt", prompts["messages"].tolist(), "messages"),
        ],
    )


def prompt_suite(max_prompt_tokens: int) -> list[gxe.Expectation]:
    """What must hold of each prompt."""
    return [
        gxe.ExpectColumnValuesToBeUnique(
            column="id",
            severity="critical",
            description="Ids are unique over both splits",
            meta=because(
                "R1", "Answers and states are found by id: of two prompts with one id, one is lost.", _COLLECT
            ),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="same_as_training_prompt",
            value_set=[""],
            severity="critical",
            description="No held-out prompt is among the training prompts",
            meta=because("D10", "Acceptance measured on trained prompts says nothing about others.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="last_role",
            value_set=["user"],
            severity="critical",
            description="The last message is the user's",
            meta=because("D4", "After an assistant message the template has the target answer itself.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="unknown_roles",
            value_set=[""],
            severity="critical",
            description="Roles are system, user and assistant",
            meta=because("D4", "Templates skip or mangle a role that they do not know, without a word.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="empty_messages",
            value_set=[0],
            severity="critical",
            description="No message is empty",
            meta=because("R4", "An empty question has no answer worth learning.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="control_token",
            value_set=[""],
            severity="critical",
            description="No message holds the text of a special token",
            meta=because("D11", "The tokenizer makes it a control token: the user's text ends the turn.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="tokens",
            min_value=1,
            max_value=max_prompt_tokens,
            severity="critical",
            description="The rendered prompt has between one token and prompts.max_prompt_tokens",
            meta=because("D8", "A longer prompt is cut later and keeps a mask of zeros.", _COLLECT),
        ),
    ]


def split_suite(gates: Gates) -> list[gxe.Expectation]:
    """What must hold of each split."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="prompts",
            min_value=gates.min_prompts,
            severity="critical",
            description="A split has at least gates.min_prompts prompts",
            meta=because(
                "R6",
                "A handful of prompts trains nothing and measures noise.",
                "Put more conversations into the folder that params.yaml names (prompts.folder), or lower gates.min_prompts.",
            ),
        ),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="prompts",
            column_B="in_manifest",
            severity="critical",
            description="The file holds as many prompts as its manifest says",
            meta=because("D9", "Files that were edited or cut in place go on unnoticed.", _COLLECT),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="dropped_share",
            max_value=gates.max_dropped_share,
            severity="critical",
            description="At most gates.max_dropped_share of the rows read were dropped",
            meta=because(
                "D8",
                "When much of the input cannot be used, it has another form than was assumed.",
                "artifacts/prompts/dropped.jsonl has file, line and reason of each. Correct the files, raise "
                "gates.max_dropped_share, or (too_long) prompts.max_prompt_tokens.",
            ),
        ),
    ]


_COLUMNS = (
    "id",
    "split",
    "domain",
    "messages",
    "last_role",
    "unknown_roles",
    "empty_messages",
    "control_token",
    "tokens",
    "same_as_training_prompt",
    "detail",
)
_SPLIT_COLUMNS = ("id", "read", "dropped", "prompts", "domains")


def _rows() -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer()
    forbidden = control_tokens(tokenizer)
    in_training: dict[str, str] = {}
    for split in SPLITS:
        for prompt in read_prompts(split):
            contents = [message["content"] for message in prompt.messages]
            roles = [message["role"] for message in prompt.messages]
            words = _fingerprint(prompt)
            if split == "train":
                in_training[words] = prompt.id
            yield {
                "id": prompt.id,
                "split": split,
                "domain": prompt.domain,
                "messages": len(prompt.messages),
                "last_role": roles[-1] if roles else "",
                "unknown_roles": ", ".join(sorted({str(role) for role in roles} - _ROLES)),
                "empty_messages": sum(not content.strip() for content in contents),
                "control_token": next((t for t in forbidden if any(t in c for c in contents)), ""),
                "tokens": _count_tokens(tokenizer, prompt),
                "same_as_training_prompt": in_training.get(words, "") if split == "heldout" else "",
                "detail": f"in {split}, from {prompt.source}",
            }


def _count_tokens(tokenizer, prompt: Prompt) -> int:
    """Tokens of the rendered prompt; 0 for a conversation that the template refuses."""
    from jinja2 import TemplateError

    try:
        return len(render_prompt(tokenizer, prompt.messages)) if prompt.messages else 0
    except TemplateError:
        return 0


def _fingerprint(prompt: Prompt) -> str:
    """`Prompt.words`, hashed, so that a million prompts fit in memory."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(prompt.words.encode())


def _splits(manifest: dict[str, Any], prompts: pd.DataFrame) -> pd.DataFrame:
    counts = Counter(prompts["split"])
    return pd.DataFrame(
        {
            "id": split,
            "prompts": counts[split],
            "in_manifest": manifest[split]["prompts"],
            "read": manifest[split]["read"],
            "dropped_share": 1 - manifest[split]["kept"] / max(manifest[split]["read"], 1),
            "domains": _counts(manifest[split]["domains"]),
            "dropped": _counts(manifest[split]["dropped"]),
            "detail": f"dropped: {_counts(manifest[split]['dropped'])}",
        }
        for split in SPLITS
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
