"""Plan the shards of a split, compute those that are not there yet, close the split.

Under torchrun rank r of n computes shards r, r + n, r + 2n, ...: shards depend on the answers alone, so any rank can
die and be run again alone, and another n takes over what is there. Whichever rank finds every shard done closes.
Held-out states come first: they are few, and who reads along while train is dumped needs them.
"""

from contextlib import ExitStack

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import require_writable
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
from tasks.dump_hidden_states.answers import require_sound_answers
from tasks.dump_hidden_states.engines import Compute, open_engine, require_devices_of_its_own
from tasks.dump_hidden_states.locks import closing_a_split, working_on
from tasks.dump_hidden_states.room import require_room
from tasks.dump_hidden_states.share import Share
from tasks.dump_hidden_states.split_plan import SplitPlan, shard_of


def dump(params: Params) -> dict[str, dict[str, int]]:
    """Write artifacts/hidden_states/{heldout,train}, or this rank's shards of them.

    Returns:
        For each split: samples, tokens, bytes, shards, and how many shards were taken over.

    Raises:
        DraftlineError: disk or quota cannot hold the states; names the options. The ranks cannot share ring or GPUs. Another
            process does the same. An answer is none that the target can read. Or a shard is missing at the end.
    """
    share = Share.of_environment()
    ranks = share.ranks
    if (ahead := params.dump.ahead_shards) and ahead < ranks:
        raise DraftlineError(
            f"{PARAMS}: dump.ahead_shards is {ahead}, fewer than the {ranks} ranks, each of which needs room for one. Set it to "
            f"at least {ranks}."
        )
    require_devices_of_its_own(params)
    with working_on(share):
        return _dump_share(params, share)


def _dump_share(params: Params, share: Share) -> dict[str, dict[str, int]]:
    for sentence in reap_stale_servers():  # one that a dead run left, whatever its engine, may still write shards
        print(sentence)
    contract = target_contract(params.contract)
    require_sound_answers(contract)
    for split in SPLITS:
        require_writable(HIDDEN_STATES / split)
    plans = [SplitPlan.of(split, params, contract, share) for split in reversed(SPLITS)]
    token_bytes = bytes_per_token(len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)
    require_room(plans, token_bytes, params)
    with ExitStack() as stack:
        compute = None
        for plan in plans:
            _clear(plan)
            if plan.own & plan.missing:
                compute = compute or stack.enter_context(
                    open_engine(params, contract, max(each.longest for each in plans))
                )
                _compute(plan, compute, params, contract, share.ranks)
            if plan.is_online and not plan.missing:
                print(
                    f"{plan.folder}: every shard was written or consumed. For a new epoch remove "
                    f"{plan.folder}/shard-*.freed and dump again."
                )
            elif not plan.is_online:
                _close(plan, params, contract, share.ranks)
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
    with closing_a_split():
        close_split(plan.folder, contract, params.dump.storage_dtype, engine, plan.shards)
