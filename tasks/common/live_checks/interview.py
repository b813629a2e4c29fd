"""What a server is asked and what it answered: greedily, one request at a time, over HTTP alone.

Two requests a prompt. The first counts the rounds that were spent on the answer. The second sends prompt and answer back
as token ids: its prefill returns the states of every token, and what it generates is what the first one's last round was
verified against, beyond the answer's end.
"""

import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tasks.common.draft_trace import DraftTrace, TracedRound
from tasks.common.sglang_client import Completion, SGLangClient

NUM_PROMPTS = 4
# States come back as JSON, 4 to 20 bytes a number: enough tokens to tell any two layers apart, and no more.
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 200, 48


@dataclass(frozen=True)
class Prompt:
    """Token ids of a conversation up to where the assistant speaks.

    Attributes:
        answer_tokens: how long the answer may be.
    """

    id: str
    token_ids: list[int]
    answer_tokens: int = MAX_ANSWER_TOKENS

    def within(self, tokens: int) -> "Prompt":
        """Its beginning: enough to compare states, though what follows is another answer."""
        return replace(self, token_ids=self.token_ids[:tokens])


@dataclass(frozen=True)
class Answer:
    """One prompt's answer.

    Attributes:
        completion: of the first request.
        beyond: tokens that follow the answer.
        states: float32 [rows, width], a row for each token of prompt and answer, where the server returns any.
        cached_tokens: of the second request: tokens without a row.
        rounds: what the server's own draft proposed, round by round; None where no hook writes it down.
    """

    prompt: Prompt
    completion: Completion
    beyond: list[int]
    states: torch.Tensor | None
    cached_tokens: int
    rounds: list[TracedRound] | None = None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt.token_ids + self.completion.output_ids


def interview(
    client: SGLangClient,
    prompts: Iterable[Prompt],
    *,
    num_steps: int,
    with_states: bool,
    trace: DraftTrace | None = None,
) -> list[Answer]:
    """Ask each prompt.

    Args:
        num_steps: draft tokens a round, which may reach beyond an answer's end.
        with_states: whether the server was started so that it can return states.

    Raises:
        DraftlineError: the server refused, aborted or died; or its vocabulary is smaller than the prompts'.
    """
    prompts, answers = list(prompts), []
    client.require_vocabulary(max(token for prompt in prompts for token in prompt.token_ids))
    for number, prompt in enumerate(prompts, 1):
        print(f"asking prompt {number} of {len(prompts)}", file=sys.stderr, flush=True)
        mark = trace.mark() if trace else 0
        completion = client.generate(prompt.token_ids, {"temperature": 0, "max_new_tokens": prompt.answer_tokens})
        rounds = trace.rounds_since(mark) if trace else None
        second = client.generate(
            prompt.token_ids + completion.output_ids,
            {"temperature": 0, "max_new_tokens": num_steps + 1, "ignore_eos": True},
            return_hidden_states=with_states,
            # Tokens found in the prefix cache have no row, and the first request has put all of them there.
            cache_key=secrets.token_hex(8) if with_states else None,
        )
        rows, tokens = second.hidden_states, len(prompt.token_ids) + len(completion.output_ids)
        states = None if rows is None else torch.from_numpy(rows[: tokens - second.cached_tokens])
        answers.append(Answer(prompt, completion, second.output_ids, states, second.cached_tokens, rounds))
    return answers
