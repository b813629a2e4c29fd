"""Plan the shards of a split, compute those that are not there yet, close the split.

Under torchrun rank r of n computes shards r, r + n, r + 2n, ...: shards depend on the answers alone, so any rank can
die and be run again alone, and another n takes over what is there. Whichever rank finds every shard done closes.
Held-out states come first: they are few, and who reads along while train is dumped needs them.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, MANIFEST, TABLE, close_split
from tasks.common.params import PARAMS, Params
from tasks.common.planned_shards import plan_shards
from tasks.common.progress import progress
from tasks.common.responses import SPLITS
from tasks.common.ring import bounded, was_written
from tasks.common.shard import shard_is_done
from tasks.common.storage import bytes_per_token
from tasks.common.target import target_contract
from tasks.common.versions import result_versions
from tasks.dump_hidden_states.engines import Compute, open_engine


@dataclass
class SplitPlan:
    """The shards of a split, those of this rank, and what is still to be computed.

    Attributes:
        online: shards come and go: those that a reader consumed are not missing, and nothing is closed.
        shards: name to plan hash, in order.
        largest: tokens of the largest shard.
    """

    split: str
    online: bool
    shards: dict[str, str] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    samples: int = 0
    tokens: int = 0
    missing_tokens: int = 0
    own_missing_tokens: int = 0
    largest: int = 0

    @property
    def folder(self) -> Path:
        return HIDDEN_STATES / self.split

    def leftovers(self) -> Iterator[Path]:
        """Files of shards that this plan does not have, or has otherwise, or that a writer left half."""
        for path in self.folder.glob("*shard-*"):
            name = _shard_of(path)
            if name not in self.shards or name in self.missing or (path.suffix == ".freed" and not self.online):
                yield path


def dump(params: Params) -> dict[str, dict[str, int]]:
    """Write artifacts/hidden_states/{heldout,train}, or this rank's shards of them.

    Returns:
        For each split: samples, tokens, bytes, shards, and how many shards were taken over.

    Raises:
        DraftlineError: disk or quota cannot hold the states; names the options. Or a shard is missing at the end.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if (ahead := params.dump.ahead_shards) and ahead < ranks:
        raise DraftlineError(
            f"{PARAMS}: dump.ahead_shards is {ahead}, fewer than the {ranks} ranks, each of which needs room for one. Set it to "
            f"at least {ranks}."
        )
    contract = target_contract(params.contract)
    plans = [_plan(split, params, contract, ranks) for split in reversed(SPLITS)]
    token_bytes = bytes_per_token(len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)
    _require_room(plans, token_bytes, params)
    with ExitStack() as stack:
        compute = None
        for plan in plans:
            _clear(plan)
            if plan.own & plan.missing:
                compute = compute or stack.enter_context(open_engine(params, contract))
                _compute(plan, compute, params, contract, ranks)
            if plan.online and not plan.missing:
                print(
                    f"{plan.folder}: every shard was written or consumed. For a new epoch remove "
                    f"{plan.folder}/shard-*.freed and dump again."
                )
            elif not plan.online:
                _close(plan, params, contract, ranks)
    return {
        plan.split: {
            "samples": plan.samples,
            "tokens": plan.tokens,
            "shards": len(plan.shards),
            "taken_over": len(plan.shards) - len(plan.missing),
            "bytes": plan.tokens * token_bytes,
        }
        for plan in plans
    }


def _plan(split: str, params: Params, contract: Contract, ranks: int) -> SplitPlan:
    rank = int(os.environ.get("RANK", 0))
    plan = SplitPlan(split, online=split == "train" and params.dump.ahead_shards is not None)
    is_there = was_written if plan.online else shard_is_done
    for index, shard in enumerate(plan_shards(split, params, contract)):
        plan.shards[shard.name] = shard.sha256
        plan.samples += len(shard.ids)
        plan.tokens += shard.tokens
        plan.largest = max(plan.largest, shard.tokens)
        is_own, is_missing = index % ranks == rank, not is_there(plan.folder, shard.name, shard.sha256)
        if is_own:
            plan.own.add(shard.name)
        if is_missing:
            plan.missing.add(shard.name)
            plan.missing_tokens += shard.tokens
            plan.own_missing_tokens += shard.tokens * is_own
    return plan


def _clear(plan: SplitPlan) -> None:
    """Remove what an earlier plan left, but for what other ranks may be writing; no result stands beside partial work."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in plan.leftovers():
        name = _shard_of(path)
        if name in plan.own or name not in plan.shards:
            path.unlink(missing_ok=True)
    if plan.online or plan.own & plan.missing:
        (plan.folder / MANIFEST).unlink(missing_ok=True)
        (plan.folder / TABLE).unlink(missing_ok=True)


def _compute(plan: SplitPlan, compute: Compute, params: Params, contract: Contract, ranks: int) -> None:
    own = (shard for shard in plan_shards(plan.split, params, contract) if shard.name in plan.own)
    if plan.online:
        shards = bounded(plan.folder, own, params.dump.ahead_shards // ranks)
    else:
        shards = (shard for shard in own if shard.name in plan.missing)
    with progress(total=plan.own_missing_tokens, desc=f"dumping {plan.split}", unit="tok") as bar:
        for shard in compute(plan.folder, shards):
            bar.update(shard.tokens)


def _close(plan: SplitPlan, params: Params, contract: Contract, ranks: int) -> None:
    missing = [name for name, sha256 in plan.shards.items() if not shard_is_done(plan.folder, name, sha256)]
    if missing and ranks == 1:
        raise DraftlineError(
            f"{plan.folder / missing[0]}: not there after the dump, and {len(missing) - 1} more. Did another process free or "
            f"remove shards meanwhile? Run `dvc repro` again: only they are dumped."
        )
    if missing:
        print(
            f"{plan.folder}: {len(missing)} shards of other ranks are missing, {missing[0]} first; the last rank closes."
        )
        return
    engine = {"name": params.dump.engine, "version": result_versions()[params.dump.engine]}
    close_split(plan.folder, contract, params.dump.storage_dtype, engine, plan.shards)


def _require_room(plans: list[SplitPlan], token_bytes: int, params: Params) -> None:
    """Refuse before anything is removed. What is taken over has its room; what is left over makes room."""
    HIDDEN_STATES.mkdir(parents=True, exist_ok=True)
    held = sum(_at_once(plan, plan.tokens, params) for plan in plans) * token_bytes
    coming = sum(_at_once(plan, plan.missing_tokens, params) for plan in plans) * token_bytes
    room = shutil.disk_usage(HIDDEN_STATES).free + sum(_size(path) for plan in plans for path in plan.leftovers())
    quota = params.dump.max_gigabytes
    if coming > room:
        limit = f"{coming / 1e9:.1f} GB of them are not there yet, and the disk has room for {room / 1e9:.1f} GB"
    elif quota is not None and held > quota * 1e9:
        limit = f"dump.max_gigabytes allows {quota:g} GB"
    else:
        return
    raise DraftlineError(
        f"{HIDDEN_STATES}: the hidden states need {held / 1e9:.1f} GB, {limit}. Options: dump.storage_dtype: bfloat16 "
        f"(half of float32) or float8 (a quarter), fewer prompts (prompts.max_train), shorter answers "
        f"(regenerate.max_new_tokens), training while the dump goes on (dump.ahead_shards), or a larger disk mounted at "
        f"{HIDDEN_STATES}."
    )


def _at_once(plan: SplitPlan, tokens: int, params: Params) -> int:
    """How many of so many tokens have their states on the disk at once."""
    return min(tokens, params.dump.ahead_shards * plan.largest) if plan.online else tokens


def _shard_of(path: Path) -> str:
    """'shard-00003' of 'shard-00003.freed' and of '.shard-00003.safetensors.partial'."""
    return path.name.lstrip(".").partition(".")[0]


def _size(path: Path) -> int:
    """Bytes of a file, which another rank may just have renamed."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
