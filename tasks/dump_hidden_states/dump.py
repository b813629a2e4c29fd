"""Plan the shards of a split, compute those that are not there yet, close the split.

Under torchrun rank r of n computes shards r, r + n, r + 2n, ...: shards depend on the answers alone, so any rank can
die and be run again alone, and another n takes over what is there. Whichever rank finds every shard done closes.
Held-out states come first: they are few, and who reads along while train is dumped needs them.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, MANIFEST, TABLE, close_split
from tasks.common.params import PARAMS, Params
from tasks.common.planned_shards import plan_shards
from tasks.common.progress import progress
from tasks.common.responses import SPLITS
from tasks.common.ring import bounded
from tasks.common.server_session import reap_stale_servers
from tasks.common.shard import shard_is_done
from tasks.common.storage import bytes_per_token
from tasks.common.target import target_contract
from tasks.common.versions import result_versions
from tasks.dump_hidden_states.engines import Compute, open_engine, require_devices_of_its_own
from tasks.dump_hidden_states.room import require_room
from tasks.dump_hidden_states.split_plan import SplitPlan, shard_of

# Beside the folder, which is DVC's output.
_LOCK = HIDDEN_STATES.with_suffix(".lock")


def dump(params: Params) -> dict[str, dict[str, int]]:
    """Write artifacts/hidden_states/{heldout,train}, or this rank's shards of them.

    Returns:
        For each split: samples, tokens, bytes, shards, and how many shards were taken over.

    Raises:
        DraftlineError: disk or quota cannot hold the states; names the options. The ranks cannot share ring or GPUs. Or a shard
            is missing at the end.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if (ahead := params.dump.ahead_shards) and ahead < ranks:
        raise DraftlineError(
            f"{PARAMS}: dump.ahead_shards is {ahead}, fewer than the {ranks} ranks, each of which needs room for one. Set it to "
            f"at least {ranks}."
        )
    require_devices_of_its_own(params)
    for sentence in reap_stale_servers():  # one that a dead run left, whatever its engine, may still write shards
        print(sentence)
    contract = target_contract(params.contract)
    plans = [SplitPlan.of(split, params, contract, ranks) for split in reversed(SPLITS)]
    token_bytes = bytes_per_token(len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)
    require_room(plans, token_bytes, params)
    with ExitStack() as stack:
        compute = None
        for plan in plans:
            _clear(plan)
            if plan.own & plan.missing:
                compute = compute or stack.enter_context(open_engine(params, contract))
                _compute(plan, compute, params, contract, ranks)
            if plan.is_online and not plan.missing:
                print(
                    f"{plan.folder}: every shard was written or consumed. For a new epoch remove "
                    f"{plan.folder}/shard-*.freed and dump again."
                )
            elif not plan.is_online:
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


def _clear(plan: SplitPlan) -> None:
    """Remove what an earlier plan left, but for what other ranks may be writing; no result stands beside partial work."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in plan.leftovers():
        name = shard_of(path)
        if name in plan.own or name not in plan.shards:
            path.unlink(missing_ok=True)
    if plan.is_online or plan.own & plan.missing:
        (plan.folder / MANIFEST).unlink(missing_ok=True)
        (plan.folder / TABLE).unlink(missing_ok=True)


def _compute(plan: SplitPlan, compute: Compute, params: Params, contract: Contract, ranks: int) -> None:
    own = (shard for shard in plan_shards(plan.split, params, contract) if shard.name in plan.own)
    if plan.is_online:
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
    with _alone():
        close_split(plan.folder, contract, params.dump.storage_dtype, engine, plan.shards)


@contextmanager
def _alone() -> Iterator[None]:
    """Ranks that finish together close a split one after the other, on several hosts too: NFS locks a file that is open for
    writing, and no folder.
    """
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
