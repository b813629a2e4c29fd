"""Where the prompts will come from, and how many tokens they hold, before any tokenizer is loaded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import read_numbered_jsonl
from tasks.common.params import Prompts
from tasks.common.prompts import split_of, turns_of
from tasks.common.responses import SPLITS

# UTF-8 bytes of a token: 3.4 (maths) to 4.3 (prose) over the built-in prompts with a vocabulary of 49,152.
_BYTES_PER_TOKEN = 3.9
# Role markers and a default system prompt: 30 with the built-in target's template.
_TEMPLATE_TOKENS = 30


@dataclass(frozen=True)
class PromptSource:
    """The rows of one file that belong to one split.

    Attributes:
        prompts: rows; `collect_prompts` may drop some.
        tokens: estimate, template included, rows cut at prompts.max_prompt_tokens.
    """

    file: str
    split: str
    prompts: int
    tokens: int


def count_prompts(params: Prompts) -> list[PromptSource]:
    """Count the rows of prompts.folder by file and split; files are streamed, never held.

    Raises:
        DraftlineError: no file, a line that is not a JSON object, or an unknown split; names it.
    """
    folder = Path(params.folder)
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise DraftlineError(f"prompts.folder: {folder} holds no .jsonl file")
    return [source for path in files for source in _count(path, params.max_prompt_tokens)]


def prompts_and_tokens(sources: list[PromptSource], split: str, limit: int | None) -> tuple[int, int]:
    """(prompts, their tokens) of a split after prompts.max_train or prompts.max_heldout."""
    prompts = sum(source.prompts for source in sources if source.split == split)
    tokens = sum(source.tokens for source in sources if source.split == split)
    if limit is None or prompts <= limit:
        return prompts, tokens
    return limit, tokens * limit // prompts


def _count(path: Path, max_tokens: int) -> list[PromptSource]:
    prompts, tokens = Counter(), Counter()
    for line, row in read_numbered_jsonl(path):
        split = split_of(row, path, line)
        prompts[split] += 1
        tokens[split] += min(max_tokens, _TEMPLATE_TOKENS + int(_text_bytes(row) / _BYTES_PER_TOKEN))
    return [PromptSource(str(path), split, prompts[split], tokens[split]) for split in SPLITS if prompts[split]]


def _text_bytes(row: dict) -> int:
    """Bytes of what was said, answers in the data set included: the estimate errs upward."""
    said = (words for _, words in turns_of(row) or ())
    return sum(len(words.encode(errors="surrogatepass")) for words in said if isinstance(words, str))
