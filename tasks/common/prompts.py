"""A prompt, as `collect_prompts` writes it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_jsonl
from tasks.common.responses import SPLITS

PROMPTS = ARTIFACTS / "prompts"


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user message: what the target is asked.

    Attributes:
        id: unique over all splits.
        domain: kind of task, for spread and for tables by domain.
        source: 'builtin' or the path it came from.
        messages: [{"role": ..., "content": ...}].
    """

    id: str
    domain: str
    source: str
    messages: list[dict]

    @property
    def words(self) -> str:
        """Roles and words, whatever the case and white space: prompts that agree in this are the same prompt."""
        return "\n".join(f"{m['role']}: {' '.join(m['content'].casefold().split())}" for m in self.messages)

    def to_row(self) -> dict:
        return asdict(self)


def read_prompts(split: str, folder: Path = PROMPTS) -> Iterator[Prompt]:
    """Yield the prompts of a split ('train' or 'heldout') in file order."""
    for row in read_jsonl(folder / f"{split}.jsonl"):
        yield Prompt(**row)


def split_of(row: dict, path: Path, line: int) -> str:
    """The split of a data set's row: its own field, or what the file's name says.

    Raises:
        DraftlineError: an unknown split; names file and line.
    """
    split = row.get("split") or ("heldout" if path.name.startswith("heldout") else "train")
    if split not in SPLITS:
        raise DraftlineError(f"{path}:{line}: split is {split!r}, expected one of {', '.join(SPLITS)}.")
    return split


def turns_of(row: dict) -> list[tuple[Any, Any]] | None:
    """(speaker, words) of each turn of a data set's row, whatever they are; None where it holds no conversation."""
    for field, speaker, words in (("messages", "role", "content"), ("conversations", "from", "value")):
        if isinstance(row.get(field), list):
            turns = [turn if isinstance(turn, dict) else {} for turn in row[field]]
            return [(turn.get(speaker), turn.get(words)) for turn in turns]
    if isinstance(row.get("turns"), list) and row["turns"]:  # what follows would be asked on the target's own answer
        return [("user", row["turns"][0])]
    return [("user", row["prompt"])] if isinstance(row.get("prompt"), str) else None


def spread_over_domains(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts, taken in turn from each domain, so that a small sample covers all."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    ranked = [
        (rank, order, prompt) for order, group in enumerate(by_domain.values()) for rank, prompt in enumerate(group)
    ]
    return [prompt for _, _, prompt in sorted(ranked, key=lambda item: item[:2])[:count]]
