"""Prompts and states out of a dump: the server must return, for the same token ids, what the draft was trained on."""

from collections.abc import Sequence

import torch

from tasks.common.hidden_states import HiddenStates
from tasks.common.live_checks.interview import MAX_ANSWER_TOKENS, MAX_PROMPT_TOKENS, Answer, Prompt
from tasks.common.live_checks.parity import Reference

# Samples looked at for each that is chosen: long prompts are passed over.
_CANDIDATES = 8


def dumped_prompts(states: HiddenStates, count: int) -> list[Prompt]:
    """Prompts of a few samples from all over a split, none longer than what is asked of a server."""
    prompts = (_prompt(states, index) for index in _spread(len(states), _CANDIDATES * count))
    fitting = [prompt for prompt in prompts if prompt and len(prompt.token_ids) <= MAX_PROMPT_TOKENS]
    return [fitting[place] for place in _spread(len(fitting), count)]


def dumped_references(
    states: HiddenStates, answers: Sequence[Answer], named: dict[str, dict[str, torch.Tensor]]
) -> list[Reference]:
    """The dump's states of the samples that were asked, as far as they were replayed.

    Args:
        named: every state of the target by prompt, where it can be run.
    """
    places = {row.id: place for place, row in enumerate(states.samples)}
    references = []
    for answer in answers:
        sample = states.read(places[answer.prompt.id])
        end = len(answer.prompt.token_ids) + MAX_ANSWER_TOKENS
        references.append(
            Reference("the dump", sample.id, sample.input_ids[:end], sample.aux[:end].float(), named.get(sample.id, {}))
        )
    return references


def _prompt(states: HiddenStates, index: int) -> Prompt | None:
    """Tokens up to the first that the assistant wrote."""
    input_ids, loss_mask = states.read_tokens(index)
    start = int(loss_mask.argmax())
    return Prompt(states.samples[index].id, input_ids[:start].tolist()) if start else None


def _spread(length: int, count: int) -> list[int]:
    count = min(count, length)
    return sorted({round(place * (length - 1) / max(count - 1, 1)) for place in range(count)})
