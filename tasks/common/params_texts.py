"""Texts of params.yaml that the system would not take as a path, an argument or a variable.

Python raises a ValueError or an OSError of its own where such a text is used, far from who wrote it.
"""

import re
import shutil
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator

# Bytes that Linux takes: of a path, of a name within it, and of one argument or variable without its end (execve(2)).
_LONGEST_PATH, _LONGEST_NAME, _LONGEST_WORD = 4095, 255, 131_071


def _require_short_path(value: str) -> str:
    longest = max(len(name.encode()) for name in value.split("/"))
    if len(value.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise ValueError(
            f"no path: {len(value):,} characters, {value[:40]}…; the system takes {_LONGEST_PATH} bytes, {_LONGEST_NAME} of "
            f"them between two slashes"
        )
    return value


# A file, a folder, or a hub id, which could be one.
PathText = Annotated[str, AfterValidator(_require_short_path)]


def require_possible_texts(value: Any) -> None:
    """
    Args:
        value: a parameter as it was read: a text, or a list or a mapping of texts; all else passes.

    Raises:
        ValueError: one holds a NUL or half of a surrogate pair.
    """
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for text in (one for one in values if isinstance(one, str)):
        if odd := re.search("[\0\ud800-\udfff]", text):
            raise ValueError(
                f"{text[:40]!r} holds the character {odd[0]!r}, which no path, argument or variable can; remove it"
            )


def require_fitting_words(words: Iterable[str]) -> None:
    """
    Raises:
        ValueError: an argument, or a variable with its name, is too long for the system.
    """
    for word in words:
        if len(word.encode()) > _LONGEST_WORD:
            raise ValueError(
                f"{word[:40]}… has {len(word):,} characters; the system takes {_LONGEST_WORD:,} bytes at once"
            )


def require_programs(path: str) -> None:
    """
    Args:
        path: a value of PATH.

    Raises:
        ValueError: not even `sh` is found in it.
    """
    if shutil.which("sh", path=path) is None:
        raise ValueError(
            f"PATH={path[:80]} holds no `sh`, and SGLang calls programs. It replaces the PATH that there is: write all of it"
        )
