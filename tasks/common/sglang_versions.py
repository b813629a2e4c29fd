"""What differs between SGLang's releases for an EAGLE-3 draft: a row for each that differs from the one before.

Each fact was read in the source of every release from OLDEST to NEWEST; what classes of targets capture stands in
common/capture.py. A release between two rows is as the older one. One after the newest is taken as the newest, since
nothing is known of it: the doctor says so.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """One release.

    Attributes:
        norm_before_fc: whether the draft's class has `input_norm` over the concatenated aux states.
        tree_backends: attention backends that take top-k > 1 together with a page size > 1.
        return_aux_hidden_states: whether --enable-return-aux-hidden-states exists.
    """

    version: str
    norm_before_fc: bool
    tree_backends: tuple[str, ...]
    return_aux_hidden_states: bool


ENGINES = (
    Engine("0.5.16", False, ("flashinfer", "fa3", "triton"), False),
    Engine("0.5.17", True, ("flashinfer", "fa3", "triton"), False),
    Engine("0.5.23", True, ("flashinfer", "fa3", "triton"), True),
)
OLDEST, NEWEST = ENGINES[0].version, ENGINES[-1].version


def engine_of(version: str) -> Engine | None:
    """The row that describes a release; None before the first."""
    rows = [engine for engine in ENGINES if number(engine.version) <= number(version)]
    return rows[-1] if rows else None


def number(version: str) -> tuple[int, ...]:
    """'0.5.16.post1' -> (0, 5, 16), '0.5.24rc1' -> (0, 5, 24)."""
    return tuple(int(digits.group()) for part in version.split(".")[:3] if (digits := re.match(r"\d+", part)))
