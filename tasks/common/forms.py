"""The form that a JSON file must have for those who read it: what is missing or of another kind is one sentence."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json


class Form(BaseModel):
    """The fields that are read; there may be others. Text is no number, and neither is what is not finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


_Form = TypeVar("_Form", bound=Form)


def read_form(path: Path, form: type[_Form], fix: str) -> _Form:
    """
    Args:
        fix: what to do about a file that has another form, a sentence.

    Raises:
        DraftlineError: the file is absent, cannot be read, is not JSON, or a field is missing or of another kind; names file
            and field.
    """
    try:
        return form.model_validate(read_json(path))
    except ValidationError as error:
        raise DraftlineError(f"{path}: {fault(error)}. {fix}") from None
    except DraftlineError as error:
        raise DraftlineError(f"{error} {fix}" if path.exists() else str(error)) from None


def fault(error: ValidationError) -> str:
    """The first field that is wrong, what is expected there and what was found; one that is absent only where none is damaged."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] != "missing"), errors[0])
    place, kind = ".".join(map(str, first["loc"])), first["type"]
    what = f"{place}: " if place else ""
    if kind == "missing":
        return f"{what}is missing"
    if kind in ("model_type", "dict_type"):
        return f"{what}a JSON object is expected (found {_cut(first['input'])})"
    if kind == "value_error":
        return what + first["msg"].removeprefix("Value error, ")
    return f"{what}{first['msg'].replace('Input should be', 'must be')} (found {_cut(first['input'])})"


def _cut(value: object, longest: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
