"""Progress with an ETA: a bar on a terminal, a log line every few seconds elsewhere."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T] | None = None, *, total: int, desc: str, unit: str, initial: int = 0) -> "tqdm[T]":
    """Wrap `items`, or return a bar to `update` by hand (also a context manager).

    Args:
        total: items in all, those already done included.
        initial: items that an earlier run had done.
    """
    on_terminal = sys.stderr.isatty()
    bar: tqdm = tqdm(
        items,
        total=total,
        initial=initial,
        desc=desc,
        unit=unit,
        unit_scale=total > 10_000,
        mininterval=0.2 if on_terminal else 10,
        # A log has no carriage return: a line each time, and no bar characters.
        bar_format=None
        if on_terminal
        else "{desc}: {n_fmt}/{total_fmt} {unit} {elapsed}<{remaining} {rate_fmt}{postfix}\n",
        file=sys.stderr,
    )
    return bar
