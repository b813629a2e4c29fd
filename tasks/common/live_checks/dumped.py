"""Prompts and states out of a dump: the server must return, for the same token ids, what the draft was trained on."""

from collections.abc import Sequence

import torch

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.live_checks.interview import MAX_ANSWER_TOKENS, MAX_PROMPT_TOKENS, NUM_PROMPTS, Answer, Prompt
from tasks.common.live_checks.slots import Reference
from tasks.common.parity import output_name

# Samples looked at for each that is chosen: a prompt that is longer than what is asked of a server is the second choice.
_CANDIDATES = 8


def dumped_prompts(states: HiddenStates) -> list[Prompt]:
    """Prompts of a few samples from all over a split.

    Raises:
        DraftlineError: no sample has a prompt and an answer.
    """
    prompts = [_prompt(states, index) for index in _spread(len(states), _CANDIDATES * NUM_PROMPTS)]
    prompts = [prompt for prompt in prompts if prompt.token_ids and prompt.answer_tokens]
    if not prompts:
        raise DraftlineError(
            f"{states.folder}: no sample with a prompt and an answer: there is nothing to ask a server."
        )
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= MAX_PROMPT_TOKENS]
    longer = [prompt.within(MAX_PROMPT_TOKENS) for prompt in prompts if len(prompt.token_ids) > MAX_PROMPT_TOKENS]
    return [fitting[place] for place in _spread(len(fitting), NUM_PROMPTS)] or longer[:NUM_PROMPTS]


def dumped_references(
    states: HiddenStates, answers: Sequence[Answer], named: dict[str, dict[str, torch.Tensor]]
) -> list[Reference]:
    """The dump's states of the samples that were asked, as far as they were replayed.

    Args:
        named: every state of the target by prompt; empty where it cannot be run, and the dump's own must do.
    """
    places = {name: place for place, name in enumerate(states.ids)}
    references = []
    for answer in answers:
        sample = states.read(places[answer.prompt.id])
        end = len(answer.prompt.token_ids) + MAX_ANSWER_TOKENS
        known = named.get(sample.id)
        references.append(
            Reference(
                source="the dump",
                prompt=sample.id,
                input_ids=sample.input_ids[:end],
                aux=sample.aux[:end].float(),
                states=known or _own_states(states, sample),
                complete=known is not None,
            )
        )
    return references


def _own_states(states: HiddenStates, sample: Sample) -> dict[str, torch.Tensor]:
    layers = {
        output_name(layer): sample.aux[:, slot].float() for slot, layer in enumerate(states.contract.aux_layer_ids)
    }
    return layers | {"the final state": sample.last.float()}


def _prompt(states: HiddenStates, index: int) -> Prompt:
    """Tokens up to the first that the assistant wrote; as long an answer as is dumped."""
    input_ids, loss_mask = states.read_tokens(index)
    start = int(loss_mask.argmax())
    answered = int(loss_mask[start:].cumprod(0).sum())
    return Prompt(states.ids[index], input_ids[:start].tolist(), min(answered, MAX_ANSWER_TOKENS))


def _spread(length: int, count: int) -> list[int]:
    count = min(count, length)
    return sorted({round(place * (length - 1) / max(count - 1, 1)) for place in range(count)})
