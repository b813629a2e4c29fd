"""What is asked: the run's held-out prompts, or sets of questions by path."""

from collections.abc import Sequence
from pathlib import Path

from tasks.common.conversations import read_file
from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.prompts import spread_over_domains
from tasks.common.responses import read_responses
from tasks.common.traffic import Load, Question

HELDOUT = "heldout"


def loads_of(params: Params) -> list[Load]:
    """Every set at every concurrency, greedily; above temperature 0 at the lowest concurrency alone.

    Raises:
        DraftlineError: a set's file is absent, holds no question, or one that the servers' context does not.
    """
    asked = params.benchmark
    if asked.sets:
        sets = {name: _read(name, path, params) for name, path in asked.sets.items()}
    else:
        heldout = spread_over_domains(list(read_responses(HELDOUT)), asked.num_prompts)
        if not heldout:
            raise DraftlineError(
                "The held-out prompts are none: artifacts/responses/heldout.jsonl is empty. Name benchmark.sets."
            )
        sets = {HELDOUT: [Question(row.id, row.domain, row.prompt_token_ids) for row in heldout]}
    for name, questions in sets.items():
        _require_room(name, questions, params)
    return [
        Load.of(name, questions, asked.num_prompts, concurrency, temperature, asked.max_new_tokens)
        for temperature in asked.temperatures
        for concurrency in asked.concurrency
        if temperature == 0 or concurrency == asked.concurrency[0]
        for name, questions in sets.items()
    ]


def _read(name: str, path: str, params: Params) -> list[Question]:
    """Questions of a file, spread over its domains, rendered with the target's template; of several turns the first."""
    from jinja2 import TemplateError

    from tasks.common.target import control_tokens, load_tokenizer, render_prompt

    tokenizer = load_tokenizer()
    rows = list(read_file(Path(path), path, splits=False))
    for row in rows:
        if row.prompt is None:
            raise DraftlineError(
                f"{path}:{row.line}: no question: {row.reason}. {_where(name)} must hold a question a line."
            )
    chosen = spread_over_domains([row.prompt for row in rows], params.benchmark.num_prompts)
    if not chosen:
        raise DraftlineError(f"{path}: holds no question. {_where(name)} names it.")
    lines, control = {row.prompt.id: row.line for row in rows}, control_tokens(tokenizer)
    questions = []
    for prompt in chosen:
        where = f"{path}:{lines[prompt.id]}"
        if found := [token for token in control if any(token in message["content"] for message in prompt.messages)]:
            raise DraftlineError(
                f"{where}: the text {found[0]!r} would become a control token (D11). Take it out of the question."
            )
        try:
            questions.append(Question(prompt.id, prompt.domain, render_prompt(tokenizer, prompt.messages)))
        except TemplateError as error:
            raise DraftlineError(
                f"{where}: the target's chat template refuses the question: {error}. Leave it out."
            ) from None
    return questions


def _require_room(name: str, questions: Sequence[Question], params: Params) -> None:
    longest = max(questions, key=lambda question: len(question.token_ids))
    needed = len(longest.token_ids) + params.benchmark.max_new_tokens + params.serve.num_draft_tokens
    if needed > params.serve.context_length:
        raise DraftlineError(
            f"{_where(name)}: question {longest.id} has {len(longest.token_ids)} tokens, {needed} with benchmark.max_new_tokens "
            f"and serve.num_draft_tokens, and serve.context_length is {params.serve.context_length}: SGLang would refuse it. Raise serve.context_length, or "
            f"leave the question out."
        )


def _where(name: str) -> str:
    return f"{PARAMS}: benchmark.sets.{name}" if name != HELDOUT else "The held-out prompts"
