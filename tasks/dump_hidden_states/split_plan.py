"""What a dump of one split still has to do: its shards, which of them are missing, which of those are this rank's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.params import Params
from tasks.common.planned_shards import plan_shards
from tasks.common.ring import is_freed
from tasks.common.shard import files_of_shards, shard_is_done
from tasks.common.shard_layout import ShardPlan
from tasks.dump_hidden_states.share import Share


@dataclass
class SplitPlan:
    """The shards of a split, those of this rank, and what is still to be computed.

    Attributes:
        ahead_shards: online, so many shards are there at once: those that a reader consumed are not missing, and nothing is
            closed. None: all stay.
        shards: name to plan hash, in order.
        largest: tokens of the largest shard.
        longest: tokens and name of the longest sample that this rank computes.
        waiting_tokens: of the shards that are there, among the next `ahead_shards` that a reader takes.
    """

    split: str
    ahead_shards: int | None
    shards: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    samples: int = 0
    tokens: int = 0
    missing_tokens: int = 0
    own_missing_tokens: int = 0
    waiting_tokens: int = 0
    largest: int = 0
    longest: tuple[int, str] = (0, "")

    @classmethod
    def of(cls, split: str, params: Params, contract: Contract, share: Share) -> "SplitPlan":
        """Look at what an earlier run left of the plan that these parameters make."""
        plan = cls(split, params.dump.ahead_shards if split == "train" else None)
        unread = 0
        for index, shard in enumerate(plan_shards(split, params, contract)):
            plan.shards[shard.name] = shard.sha256
            plan.samples += len(shard.ids)
            plan.tokens += shard.tokens
            plan.largest = max(plan.largest, shard.tokens)
            is_own = share.has(index)
            if is_own:
                plan.own.add(shard.name)
            # In this order: one becomes the other meanwhile.
            is_there = shard_is_done(plan.folder, shard.name, shard.sha256)
            if not is_there and plan.is_online and is_freed(plan.folder, shard.name, shard.sha256):
                continue
            unread += 1
            if not is_there:
                plan.missing.add(shard.name)
                plan.missing_tokens += shard.tokens
                if is_own:
                    plan.own_missing_tokens += shard.tokens
                    plan.longest = max(plan.longest, *_lengths(shard))
            elif plan.is_online and unread <= plan.ahead_shards:
                plan.waiting_tokens += shard.tokens
        return plan

    @property
    def folder(self) -> Path:
        return HIDDEN_STATES / self.split

    @property
    def is_online(self) -> bool:
        return self.ahead_shards is not None

    @property
    def tokens_at_once(self) -> int:
        """How many tokens have their states on the disk at once, at most."""
        return self.tokens if self.ahead_shards is None else min(self.tokens, self.ahead_shards * self.largest)

    @property
    def tokens_to_come(self) -> int:
        """How many more than now, at most: what waits in the ring has its place there already."""
        if not self.is_online:
            return self.missing_tokens
        return min(self.missing_tokens, max(0, self.tokens_at_once - self.waiting_tokens))

    def leftovers(self) -> Iterator[Path]:
        """Files of shards that this plan does not have, or has otherwise, or that a writer left half."""
        for path in files_of_shards(self.folder):
            name = shard_of(path)
            if name not in self.shards or name in self.missing or (path.suffix == ".freed" and not self.is_online):
                yield path


def shard_of(path: Path) -> str:
    """'shard-00003' of 'shard-00003.freed' and of '.shard-00003.safetensors.partial'."""
    return path.name.lstrip(".").partition(".")[0]


def _lengths(shard: ShardPlan) -> Iterator[tuple[int, str]]:
    """Tokens and name of each sample."""
    return zip((shard.offsets[1:] - shard.offsets[:-1]).tolist(), shard.ids, strict=True)
