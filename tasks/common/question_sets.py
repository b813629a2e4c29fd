"""The sets of questions of `benchmark.sets`: read, rendered, and refused where the benchmark could not ask them."""

from collections.abc import Sequence

from tasks.common.conversations import FORMS, Row, read_file
from tasks.common.errors import DraftlineError
from tasks.common.files import expanded
from tasks.common.params import PARAMS, Params
from tasks.common.prompts import spread_over_domains
from tasks.common.traffic import Question


def read_set(name: str, params: Params) -> list[Row]:
    """The questions of a set that are asked, spread over its domains; of several turns the first.

    Raises:
        DraftlineError: no file, or one that holds no question in one of its lines; names parameter, file and line.
    """
    where = field_of(name)
    path = expanded(params.benchmark.sets[name], where)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is not there"
        raise DraftlineError(
            f"{where}: {str(path)!r} {found}. Expected: a JSONL file with a question a line, its path as seen from the "
            f"repository's root. Correct the path. A line: {FORMS}."
        )
    try:
        rows = list(read_file(path, str(path), splits=False))
    except DraftlineError as error:
        raise DraftlineError(f"{where}: {error} Expected: a question a line, {FORMS}. Correct the file.") from None
    except OSError as error:
        raise DraftlineError(
            f"{where}: {path} cannot be read: {error.strerror}. Run as its owner, or chmod it."
        ) from None
    for row in rows:
        if row.prompt is None:
            raise DraftlineError(
                f"{where}: {path}:{row.line}: no question: {row.problem}. Expected: {FORMS}. Correct the line, or take it out."
            )
    if not rows:
        raise DraftlineError(f"{where}: {path} holds no question. Expected: a question a line, {FORMS}. Write some.")
    by_id = {row.prompt.id: row for row in rows}
    return [by_id[prompt.id] for prompt in spread_over_domains([r.prompt for r in rows], params.benchmark.num_prompts)]


def render_set(name: str, rows: Sequence[Row], tokenizer, params: Params) -> list[Question]:
    """Token ids of the questions, by the target's template.

    Args:
        tokenizer: the target's.

    Raises:
        DraftlineError: a question would become a control token, is refused by the template, or has no room in the
            context that is served.
    """
    from jinja2 import TemplateError

    from tasks.common.target import control_tokens, render_prompt

    control, questions = control_tokens(tokenizer), []
    for row in rows:
        prompt, where = row.prompt, f"{field_of(name)}: {row.file}:{row.line}"
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
        require_room(where, questions[-1], params)
    return questions


def require_room(where: str, question: Question, params: Params) -> None:
    """
    Args:
        where: the question stands.

    Raises:
        DraftlineError: the question and its answer are longer than what is served.
    """
    length = len(question.token_ids)
    needed = length + params.benchmark.max_new_tokens + params.serve.reserved_tokens
    if needed > params.serve.context_length:
        raise DraftlineError(
            f"{where}: question {question.id} has {length} tokens, {needed} with benchmark.max_new_tokens and "
            f"the {params.serve.reserved_tokens} of a round, and serve.context_length is {params.serve.context_length}: SGLang would refuse it. "
            f"Raise serve.context_length, or leave the question out."
        )


def field_of(name: str) -> str:
    """Where params.yaml names a set."""
    return f"{PARAMS}: benchmark.sets.{name}"
