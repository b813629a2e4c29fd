"""From a folder of conversations to two clean, disjoint splits."""

from collections import Counter
from pathlib import Path

from jinja2 import TemplateError

from tasks.common.conversations import Row, read_folder
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json, write_jsonl
from tasks.common.params import Prompts
from tasks.common.prompts import PROMPTS, Prompt, spread_over_domains
from tasks.common.responses import SPLITS
from tasks.common.target import control_tokens, render_prompt


def collect_prompts(params: Prompts, tokenizer) -> dict:
    """Write artifacts/prompts/{train,heldout,dropped}.jsonl and manifest.json.

    A training prompt that equals a held-out one is dropped from training (failure mode D10); of repeated
    prompts the first is kept.

    Returns:
        The manifest: for each split the rows read, kept and dropped by reason, prompts taken and domains.

    Raises:
        DraftlineError: a file cannot be read, or a split would be empty; lists the reasons.
    """
    screen = _Screen(tokenizer, params.max_prompt_tokens)
    read, reasons = Counter(), {split: Counter() for split in SPLITS}
    kept: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    dropped = []
    rows = list(read_folder(Path(params.folder)))
    for row in sorted(rows, key=lambda row: row.split != "heldout"):  # stable: held-out first, so that leaks are seen
        read[row.split] += 1
        reason = row.reason or screen.flaw(row)
        if reason:
            dropped.append({"file": row.file, "line": row.line, "split": row.split, "reason": reason})
            reasons[row.split][reason] += 1
        else:
            kept[row.split].append(row.prompt)
    manifest = {}
    for split, limit in (("train", params.max_train), ("heldout", params.max_heldout)):
        if not kept[split]:
            raise DraftlineError(
                f"prompts.folder: {params.folder} gives no {split} prompt ({read[split]} rows read, dropped: "
                f"{dict(reasons[split]) or 'none'}). A row belongs to {split} by its field `split`, or by a file name "
                f"that {'starts' if split == 'heldout' else 'does not start'} with 'heldout'."
            )
        taken = spread_over_domains(kept[split], limit) if limit else kept[split]
        write_jsonl(PROMPTS / f"{split}.jsonl", (prompt.to_row() for prompt in taken))
        manifest[split] = {
            "read": read[split],
            "kept": len(kept[split]),
            "dropped": dict(sorted(reasons[split].items())),
            "prompts": len(taken),
            "domains": dict(Counter(prompt.domain for prompt in taken)),
        }
    write_jsonl(PROMPTS / "dropped.jsonl", dropped)
    write_json(PROMPTS / "manifest.json", manifest)
    return manifest


class _Screen:
    """Finds what would be trained on wrongly: repeats, leaks, control tokens in the text, over-long prompts."""

    def __init__(self, tokenizer, max_tokens: int):
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.control_tokens = control_tokens(tokenizer)
        self.seen: dict[str, str] = {}

    def flaw(self, row: Row) -> str | None:
        """Why the row's prompt must not be used, or None; a prompt without flaw is remembered."""
        messages = row.prompt.messages
        key = row.prompt.words
        if key in self.seen:
            return "duplicate" if self.seen[key] == row.split else "in_heldout"
        if any(token in message["content"] for message in messages for token in self.control_tokens):
            return "special_token_in_text"  # failure mode D11: it would become a control token
        try:
            if len(render_prompt(self.tokenizer, messages)) > self.max_tokens:
                return "too_long"
        except TemplateError:  # raised by the template itself, at two user messages in a row for one
            return "refused_by_template"
        self.seen[key] = row.split
        return None
