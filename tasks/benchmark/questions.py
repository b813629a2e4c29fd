"""What is asked: the run's held-out prompts, or sets of questions by path."""

from tasks.common.benchmark_names import HELDOUT
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.prompts import spread_over_domains
from tasks.common.question_sets import read_set, render_set, require_room
from tasks.common.responses import read_responses
from tasks.common.target import load_tokenizer
from tasks.common.traffic import Load, Question, asked_at


def loads_of(params: Params) -> list[Load]:
    """Every set at every concurrency, greedily; above temperature 0 at the lowest concurrency alone.

    Raises:
        DraftlineError: a set's file is absent, holds no question, or one that the servers' context does not.
    """
    asked = params.benchmark
    sets = _sets(params) if asked.sets else {HELDOUT: _heldout(params)}
    return [
        Load.of(name, questions, asked.num_prompts, concurrency, temperature, asked.max_new_tokens)
        for concurrency, temperature in asked_at(asked.concurrency, asked.temperatures)
        for name, questions in sets.items()
    ]


def _sets(params: Params) -> dict[str, list[Question]]:
    rows = {name: read_set(name, params) for name in params.benchmark.sets}
    tokenizer = load_tokenizer()
    return {name: render_set(name, chosen, tokenizer, params) for name, chosen in rows.items()}


def _heldout(params: Params) -> list[Question]:
    heldout = spread_over_domains(list(read_responses(HELDOUT)), params.benchmark.num_prompts)
    if not heldout:
        raise DraftlineError(
            "The held-out prompts are none: artifacts/responses/heldout.jsonl is empty. Name benchmark.sets."
        )
    questions = [Question(row.id, row.domain, row.prompt_token_ids) for row in heldout]
    for question in questions:
        require_room("The held-out prompts", question, params)
    return questions
