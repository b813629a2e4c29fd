"""Probes: small programs that find out one thing each, run at the same time in processes of their own.

An import that crashes, hangs, or takes a GPU's memory then harms only the probe. This module needs nothing
but Python itself, since one probe runs under whatever `python` is on PATH.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def respond(find: Callable[[Any], dict]) -> None:
    """Call `find` with the JSON of the command line; print its answer, or the error, as the last line."""
    started = time.monotonic()
    try:
        facts = find(json.loads(sys.argv[1]))
    except Exception as error:
        facts = {"error": reason(error)}
    print()
    print(json.dumps({**facts, "seconds": round(time.monotonic() - started, 1)}), flush=True)


def reason(error: BaseException) -> str:
    """An exception and what caused it, in one line: a lazy import hides the real reason behind a second one."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return " <- ".join(f"{_kind(link)}{' '.join(str(link).split())[:500]}" for link in chain)


def _kind(error: BaseException) -> str:
    name = type(error).__name__
    return "" if name == "DraftlineError" else f"{name}: "
