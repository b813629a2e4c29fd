"""A response of the target, as `regenerate_responses` writes it and every later stage reads it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_jsonl

RESPONSES = ARTIFACTS / "responses"
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Response:
    """One answer with the token ids that the target really saw and generated: nothing is re-tokenised later.

    Attributes:
        prompt_token_ids: the rendered conversation, generation prompt included.
        output_token_ids: what the target generated, the stop token included where it ended the answer.
        finish_reason: 'stop' (a stop token) or 'length' (cut at max_new_tokens).
    """

    id: str
    domain: str
    messages: list[dict]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer, [T]."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def loss_mask(self) -> list[int]:
        """1 where the assistant wrote the token, [T]."""
        return [0] * len(self.prompt_token_ids) + [1] * len(self.output_token_ids)

    def to_row(self) -> dict:
        return asdict(self)


def read_responses(split: str, folder: Path = RESPONSES) -> Iterator[Response]:
    """Yield the answers of a split, in prompt order.

    Raises:
        DraftlineError: a line lacks a field or has one too many; names file and line.
    """
    path = folder / f"{split}.jsonl"
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            yield Response(**row)
        except TypeError as error:
            raise DraftlineError(
                f"{path}:{number}: not a response record: {error}. Run `dvc repro regenerate_responses`."
            ) from None


def require_heldout(asking: str) -> list[Response]:
    """All held-out answers.

    Args:
        asking: who asks their prompts, for the message.

    Raises:
        DraftlineError: there are none, or they cannot be read.
    """
    found = list(read_responses("heldout"))
    if not found:
        raise DraftlineError(
            f"{RESPONSES / 'heldout.jsonl'}: no held-out prompts, and {asking} asks them. Collect some "
            f"(infra/docs/prompts.md), then `dvc repro regenerate_responses`."
        )
    return found
