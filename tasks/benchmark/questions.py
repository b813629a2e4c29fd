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
        sets = {name: _read(name, Path(path).expanduser(), params) for name, path in asked.sets.items()}
    else:
        heldout = spread_over_domains(list(read_responses(HELDOUT)), asked.num_prompts)
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


def _read(name: str, path: Path, params: Params) -> list[Question]:
    """First turns of a file, rendered with the target's template, as many as the largest load asks."""
    from tasks.common.target import load_tokenizer, render_prompt

    tokenizer, questions = load_tokenizer(), []
    for row in read_file(path, str(path)):
        if row.prompt is None:
            raise DraftlineError(
                f"{path}:{row.line}: no question: {row.reason}. {_where(name)} must hold a question a line."
            )
        questions.append(Question(row.prompt.id, name, render_prompt(tokenizer, row.prompt.messages)))
    if not questions:
        raise DraftlineError(f"{path}: holds no question. {_where(name)} names it.")
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
