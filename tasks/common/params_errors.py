"""What is wrong in params.yaml, in the words of its reader: the field, what is expected there, what was found."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Pydantic's names of errors, by what is expected instead.
_EXPECTED = {
    "invalid_key": "a name that is a text is expected",
    "tuple_type": "a list is expected",
    "too_short": "a list with at least one value is expected",
    "dict_type": "names with a text each are expected",
    "string_type": "a text is expected",
    "int_type": "a whole number is expected",
    "int_parsing": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "float_type": "a number is expected",
    "float_parsing": "a number is expected",
    "bool_type": "true or false is expected",
    "bool_parsing": "true or false is expected",
}
_OF = {float: "numbers", int: "whole numbers", str: "texts"}


def kinds_of(annotation: Any) -> set[Any]:
    """Types of a field's values: int and None's of `tuple[Annotated[int, ...], ...] | None`."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    parts = get_args(annotation)
    return {kind for part in parts for kind in kinds_of(part)} if parts else {annotation}


def described(error: ValidationError, params: type[BaseModel]) -> Iterator[str]:
    """A sentence for each error.

    Args:
        params: the model of the whole file, whose fields are its sections.
    """
    found = error.errors()
    for one in found:
        # Of a list whose values are all wrong pydantic says too that nothing is left of it.
        if one["type"] != "too_short" or not any(_is_within(other, one) for other in found):
            yield _described(one, params)


def _is_within(error: "ErrorDetails", other: "ErrorDetails") -> bool:
    place = other["loc"]
    return len(error["loc"]) > len(place) and error["loc"][: len(place)] == place


def _described(error: "ErrorDetails", params: type[BaseModel]) -> str:
    place, kind = ".".join(map(str, error["loc"])), error["type"]
    section = params.model_fields[error["loc"][0]].annotation if len(error["loc"]) > 1 else params
    if kind == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1]), section.model_fields, n=1)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(section.model_fields)}"
        return f"{place}: no such parameter; {known}"
    if kind == "model_type":
        of_section = (
            "parameters are expected below it, indented, as `name: value`; delete the line to take its defaults"
        )
        return f"{f'{place}: {of_section}' if place else 'sections are expected'} (found {error['input']!r})"
    if kind == "value_error":
        # What is wrong between sections names its fields itself.
        return f"{f'{place}: ' if place else ''}{error['msg'].removeprefix('Value error, ')}"
    field = section.model_fields.get(error["loc"][1]) if len(error["loc"]) > 1 else None
    return f"{place}: {_expected(error, field)} (found {error['input']!r}){_meaning(error, field)}"


def _expected(error: "ErrorDetails", field: FieldInfo | None) -> str:
    kind = error["type"]
    if kind not in _EXPECTED:
        return error["msg"].replace("Input should be", "must be").replace("String should match pattern", "must match")
    words = _EXPECTED[kind]
    if field is None or not field.examples:
        return words + _in_quotes(error)
    if kind == "tuple_type":
        of = next(name for type_, name in _OF.items() if type_ in kinds_of(field.annotation))
        words = f"a list of {of} is expected"
    return f"{words}{_in_quotes(error)}, such as `{error['loc'][1]}: {field.examples[0]}`"


def _in_quotes(error: "ErrorDetails") -> str:
    number = error["type"] == "string_type" and isinstance(error["input"], int | float)
    return "; put it in quotes" if number else ""


def _meaning(error: "ErrorDetails", field: FieldInfo | None) -> str:
    """What a field whose number is out of its range means: why the limit is there."""
    bounded = error["type"].startswith(("greater_than", "less_than"))
    return f"; {error['loc'][1]}: {field.description}" if bounded and field is not None and field.description else ""
