"""What differs between SGLang's releases for an EAGLE-3 draft: one row a release, the newest last.

Each fact was read in the release's source or seen by running it. A release between two rows is taken as the older
one; one after the last row as the last, and the doctor says so.
"""

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
    Engine("0.5.23", True, ("flashinfer", "fa3", "triton"), True),
)
NEWEST = ENGINES[-1].version


def engine_of(version: str) -> Engine | None:
    """The row that describes a release; None before the first."""
    rows = [engine for engine in ENGINES if number(engine.version) <= number(version)]
    return rows[-1] if rows else None


def number(version: str) -> tuple[int, ...]:
    """'0.5.16.post1' -> (0, 5, 16)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
