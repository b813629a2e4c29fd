"""Read conversations from JSONL files, each row a prompt or a reason why it is none."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened

from tasks.common.errors import DraftlineError
from tasks.common.files import read_numbered_jsonl
from tasks.common.prompts import Prompt, split_of, turns_of

# What a line may look like.
FORMS = (
    '{"messages": [{"role": "user", "content": "..."}]}, {"conversations": [{"from": "human", "value": "..."}]}, '
    '{"turns": ["..."]} or {"prompt": "..."} (infra/docs/prompts.md)'
)
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
_FIELDS = {"messages": "a list", "conversations": "a list", "turns": "a list of texts", "prompt": "a text"}
# The reasons why a row holds no prompt, in words.
_PROBLEMS = {
    "unknown_role": "a turn is said by none of " + ", ".join(_ROLES),
    "non_text_content": "what is said in a turn is no text",
    "no_user_turn": "no turn is the user's",
    "empty_prompt": "the user's last turn is empty",
    "empty_message": "a turn is empty",
    "bad_unicode": "half of a surrogate pair, which is no character",
}


@dataclass(frozen=True)
class Row:
    """A line of a source: where it stands, its split, and its prompt or the reason why it has none.

    Attributes:
        problem: the reason in words.
    """

    file: str
    line: int
    split: str
    prompt: Prompt | None
    reason: str | None = None
    problem: str | None = None


def read_folder(folder: Path) -> Iterator[Row]:
    """Yield the rows of every *.jsonl file below `folder`, files in name order.

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
        yield from read_file(path, path.relative_to(folder).as_posix())


def read_file(path: Path, name: str, splits: bool = True) -> Iterator[Row]:
    """Yield the rows of one JSONL file.

    A row holds `messages` ([{role, content}]), `conversations` ([{from, value}], ShareGPT), `turns` (a list of what a user
    says, EAGLE and Spec-Bench; the first is asked) or `prompt` (a string), and may name its `id`, `domain` and `split`;
    without a split it belongs to heldout where the file's name starts with 'heldout', else to train. The conversation is
    ended at its last user message.

    Args:
        name: of the file, as rows are to call it.
        splits: False where all rows belong together, whatever split they name.

    Raises:
        DraftlineError: not JSONL, or an unknown split; names file and line.
    """
    for line, row in read_numbered_jsonl(path):
        split, messages = split_of(row, path, line) if splits else "heldout", _messages_of(row)
        label = _first(row, ("id", "question_id"), path.stem)
        domain = _first(row, ("domain", "category"), path.stem)
        if isinstance(messages, str):
            yield Row(name, line, split, None, messages, _PROBLEMS.get(messages) or _without_messages(row))
        elif not _is_unicode([label, domain, messages]):
            yield Row(name, line, split, None, "bad_unicode", _PROBLEMS["bad_unicode"])
        else:
            yield Row(name, line, split, Prompt(_identity(label, messages), domain, name, messages))


def _without_messages(row: dict) -> str:
    """What stands in the place of a conversation."""
    wrong = [f"{field} is {shortened(row[field])}, expected {kind}" for field, kind in _FIELDS.items() if field in row]
    if wrong:
        return "; ".join(wrong)
    return f"of {', '.join(_FIELDS)} the line has none (it has {shortened(', '.join(row)) if row else 'nothing'})"


def _first(row: dict, fields: tuple[str, ...], default: str) -> str:
    return next((str(row[field]) for field in fields if row.get(field) not in (None, "")), default)


def _is_unicode(texts: list) -> bool:
    """Whether it can be written as UTF-8: JSON can escape half a surrogate pair, which is no character."""
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _identity(label: str, messages: list[dict]) -> str:
    # The content is part of it: ids of data sets repeat across files, and an edited prompt is another prompt.
    # 64 bits of it: 32 bits agree somewhere in a set of 77,000 as often as not.
    content = json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()
    return f"{label}-{hashlib.sha256(content).hexdigest()[:16]}"


def _messages_of(row: dict) -> list[dict] | str:
    """The conversation up to its last user message, or the reason why there is none."""
    turns = turns_of(row)
    if turns is None:
        return "no_messages"
    if not all(isinstance(role, str) and role in _ROLES for role, _ in turns):
        return "unknown_role"
    messages = [{"role": _ROLES[role], "content": content} for role, content in turns]
    if not all(isinstance(m["content"], str) for m in messages):
        return "non_text_content"
    while messages and messages[-1]["role"] != "user":
        messages.pop()  # the target writes the answer, whatever one the data set holds
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    if not messages:
        return "no_user_turn"
    if not messages[-1]["content"].strip():
        return "empty_prompt"
    return messages if all(m["content"].strip() for m in messages) else "empty_message"
