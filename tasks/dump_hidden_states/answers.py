"""Answers as the target can read them, looked at before the first state is computed: one that is not would end it later."""

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.responses import RESPONSES, SPLITS, Response, read_responses


def require_sound_answers(contract: Contract) -> None:
    """
    Raises:
        DraftlineError: an answer has no tokens, one that the vocabulary lacks, or the id of another; names split and sample.
    """
    split_of: dict[str, str] = {}
    for split in reversed(SPLITS):
        for response in read_responses(split):
            wrong = _wrong(response, contract.vocab_size)
            if not wrong and response.id in split_of:
                wrong = f"its id is taken, by another sample of {split_of[response.id]}"
            if wrong:
                raise DraftlineError(
                    f"{RESPONSES / split}.jsonl, sample {response.id}: {wrong}. Run `dvc repro -f regenerate_responses`."
                )
            split_of[response.id] = split


def _wrong(response: Response, vocab_size: int) -> str:
    """What is wrong with it, or nothing."""
    if not isinstance(response.id, str):
        return "its id is no text"
    parts = (response.prompt_token_ids, response.output_token_ids)
    if not all(isinstance(part, list) and all(type(token) is int for token in part) for part in parts):
        return "its token ids are not lists of integers"
    if not response.token_ids:
        return "it has no tokens"
    low, high = min(response.token_ids), max(response.token_ids)
    if low < 0 or high >= vocab_size:
        return f"token id {low if low < 0 else high} is outside the vocabulary, 0 to {vocab_size - 1}"
    return ""
