"""Plan the shards of a split, compute those that are not there yet, close the split.

Under torchrun rank r of n computes shards r, r + n, r + 2n, ...: shards depend on the answers alone, so any rank can
die and be run again alone, and another n takes over what is there. Whichever rank finds every shard done closes.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, MANIFEST, TABLE, close_split
from tasks.common.params import Params
from tasks.common.planned_shards import plan_shards
from tasks.common.progress import progress
from tasks.common.responses import SPLITS
from tasks.common.ring import bounded, is_freed
from tasks.common.shard import shard_is_done
from tasks.common.storage import bytes_per_token
from tasks.common.target import target_contract
from tasks.common.versions import result_versions
from tasks.dump_hidden_states.engines import open_engine


@dataclass
class SplitPlan:
    """The shards of a split and which of them are missing; `mine` are those of this rank."""

    shards: dict[str, str] = field(default_factory=dict)  # name to plan hash, in order
    missing: set[str] = field(default_factory=set)
    mine: set[str] = field(default_factory=set)
    samples: int = 0
    tokens: int = 0
    missing_tokens: int = 0


def dump(params: Params) -> dict[str, dict[str, int]]:
    """Write artifacts/hidden_states/{train,heldout}, or this rank's shards of them.

    Returns:
        For each split: samples, tokens, bytes, shards, and how many shards were taken over.

    Raises:
        DraftlineError: disk or quota cannot hold the states; names the options.
    """
    contract = target_contract(params.contract)
    plans = {split: _plan(split, params, contract) for split in SPLITS}
    token_bytes = bytes_per_token(len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)
    _require_room(_held_tokens(plans, params) * token_bytes, params)
    if any(plan.mine for plan in plans.values()):
        with open_engine(params, contract) as compute:
            for split, plan in plans.items():
                _compute(split, plan, compute, params, contract)
    for split, plan in plans.items():
        if split == "train" and params.dump.ahead_shards:
            continue  # its shards come and go: there is nothing to close
        _close(HIDDEN_STATES / split, plan, params, contract)
    return {
        split: {
            "samples": plan.samples,
            "tokens": plan.tokens,
            "shards": len(plan.shards),
            "taken_over": len(plan.shards) - len(plan.missing),
            "bytes": plan.tokens * token_bytes,
        }
        for split, plan in plans.items()
    }


def _plan(split: str, params: Params, contract: Contract) -> SplitPlan:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    plan, folder = SplitPlan(), HIDDEN_STATES / split
    for index, shard in enumerate(plan_shards(split, params, contract)):
        plan.shards[shard.name] = shard.sha256
        plan.samples += len(shard.ids)
        plan.tokens += shard.tokens
        if not (shard_is_done(folder, shard.name, shard.sha256) or is_freed(folder, shard.name, shard.sha256)):
            plan.missing.add(shard.name)
            if index % ranks == rank:
                plan.mine.add(shard.name)
                plan.missing_tokens += shard.tokens
    return plan


def _compute(split: str, plan: SplitPlan, compute, params: Params, contract: Contract) -> None:
    folder = HIDDEN_STATES / split
    folder.mkdir(parents=True, exist_ok=True)
    if plan.mine:  # no result stands beside partial work
        (folder / MANIFEST).unlink(missing_ok=True)
        (folder / TABLE).unlink(missing_ok=True)
    shards = (shard for shard in plan_shards(split, params, contract) if shard.name in plan.mine)
    if split == "train" and params.dump.ahead_shards:
        shards = bounded(folder, shards, params.dump.ahead_shards)
    with progress(total=plan.missing_tokens, desc=f"dumping {split}", unit="tok") as bar:
        for shard in compute(folder, shards):
            bar.update(shard.tokens)


def _close(folder: Path, plan: SplitPlan, params: Params, contract: Contract) -> None:
    missing = [name for name, sha256 in plan.shards.items() if not shard_is_done(folder, name, sha256)]
    if missing:
        print(f"{folder}: {len(missing)} shards of other ranks are missing, {missing[0]} first; the last rank closes.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    engine = {"name": params.dump.engine, "version": result_versions()[params.dump.engine]}
    close_split(folder, contract, params.dump.storage_dtype, engine, plan.shards)


def _held_tokens(plans: dict[str, SplitPlan], params: Params) -> int:
    """Tokens whose states are on the disk at once."""
    held = {split: plan.tokens for split, plan in plans.items()}
    if params.dump.ahead_shards:
        held["train"] = min(held["train"], 2 * params.dump.ahead_shards * params.dump.shard_tokens)
    return sum(held.values())


def _require_room(needed: int, params: Params) -> None:
    HIDDEN_STATES.mkdir(parents=True, exist_ok=True)
    stored = sum(map(_size, HIDDEN_STATES.rglob("*")))
    free = shutil.disk_usage(HIDDEN_STATES).free
    quota = params.dump.max_gigabytes
    if needed > free + stored:
        limit = f"the disk has {free / 1e9:.1f} GB free"
    elif quota is not None and needed > quota * 1e9:
        limit = f"dump.max_gigabytes allows {quota:g} GB"
    else:
        return
    raise DraftlineError(
        f"{HIDDEN_STATES}: the hidden states need {needed / 1e9:.1f} GB, {limit}. Options: dump.storage_dtype: bfloat16 "
        f"(half of float32) or float8 (a quarter), fewer prompts (prompts.max_train), shorter answers "
        f"(regenerate.max_new_tokens), training while the dump goes on (dump.ahead_shards), or a larger disk mounted at "
        f"{HIDDEN_STATES}."
    )


def _size(path: Path) -> int:
    """Bytes of a file, which another rank may just have renamed."""
    with suppress(FileNotFoundError):
        return path.stat().st_size if path.is_file() else 0
    return 0
