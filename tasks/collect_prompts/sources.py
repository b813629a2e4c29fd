"""Read conversations from a folder of JSONL files, each row a prompt or a reason why it is none."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import read_numbered_jsonl
from tasks.common.prompts import Prompt
from tasks.common.responses import SPLITS

_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Row:
    """A line of a source: where it stands, its split, and its prompt or the reason why it has none."""

    file: str
    line: int
    split: str
    prompt: Prompt | None
    reason: str | None = None


def read_folder(folder: Path) -> Iterator[Row]:
    """Yield the rows of every *.jsonl file below `folder`, files in name order.

    A row holds `messages` ([{role, content}]), `conversations` ([{from, value}], ShareGPT) or `prompt` (a
    string), and may name its `id`, `domain` and `split`; without a split it belongs to heldout where the
    file's name starts with 'heldout', else to train. The conversation is ended at its last user message.

    Raises:
        DraftlineError: no file, a file that is not JSONL, or an unknown split; names file and line.
    """
    files = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise DraftlineError(
            f"prompts.folder: {folder} holds no .jsonl file. Put files there with a conversation a line, "
            f'for example {{"messages": [{{"role": "user", "content": "..."}}]}}; see infra/docs/prompts.md.'
        )
    for path in files:
        name = path.relative_to(folder).as_posix()
        for line, row in read_numbered_jsonl(path):
            split = row.get("split") or ("heldout" if path.name.startswith("heldout") else "train")
            if split not in SPLITS:
                raise DraftlineError(f"{path}:{line}: split is {split!r}, expected one of {', '.join(SPLITS)}.")
            messages = _messages_of(row)
            if isinstance(messages, str):
                yield Row(name, line, split, None, messages)
                continue
            domain = str(row.get("domain") or path.stem)
            yield Row(name, line, split, Prompt(_identity(row, path, messages), domain, name, messages))


def _identity(row: dict, path: Path, messages: list[dict]) -> str:
    # The content is part of it: ids of data sets repeat across files, and an edited prompt is another prompt.
    content = json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()
    return f"{row.get('id') or path.stem}-{hashlib.sha256(content).hexdigest()[:8]}"


def _messages_of(row: dict) -> list[dict] | str:
    """The conversation up to its last user message, or the reason why there is none."""
    if isinstance(row.get("messages"), list):
        turns = [(m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None) for m in row["messages"]]
    elif isinstance(row.get("conversations"), list):
        turns = [(m.get("from"), m.get("value")) if isinstance(m, dict) else (None, None) for m in row["conversations"]]
    elif isinstance(row.get("prompt"), str):
        turns = [("user", row["prompt"])]
    else:
        return "no_messages"
    messages = [{"role": _ROLES.get(role, role), "content": content} for role, content in turns]
    if any(m["role"] not in ("system", "user", "assistant") for m in messages):
        return "unknown_role"
    if not all(isinstance(m["content"], str) for m in messages):
        return "non_text_content"
    while messages and messages[-1]["role"] != "user":
        messages.pop()  # the target writes the answer, whatever one the data set holds
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    if not messages:
        return "no_user_turn"
    return messages if messages[-1]["content"].strip() else "empty_prompt"
