"""Which share of the shards this process computes, as torchrun's environment says."""

import os
from dataclasses import dataclass

from tasks.common.errors import DraftlineError


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `ranks` computes shards rank, rank + ranks, rank + 2 ranks, ..."""

    rank: int
    ranks: int

    @classmethod
    def of_environment(cls) -> "Share":
        """RANK of WORLD_SIZE; everything where neither is set.

        Raises:
            DraftlineError: one is set without the other, or they are no rank of a number of ranks.
        """
        said = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        if set(said.values()) == {None}:
            return cls(0, 1)
        try:
            share = cls(int(said["RANK"] or ""), int(said["WORLD_SIZE"] or ""))
        except ValueError:
            share = cls(0, 0)
        if 0 <= share.rank < share.ranks:
            return share
        found = ", ".join(f"{name} is {'not set' if value is None else repr(value)}" for name, value in said.items())
        raise DraftlineError(
            f"environment: {found}. Shares of a dump are RANK 0 to WORLD_SIZE - 1: set both, as torchrun does, or neither."
        )

    def has(self, index: int) -> bool:
        """Whether the shard of this number is one of it."""
        return index % self.ranks == self.rank
