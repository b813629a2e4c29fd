"""The gate on hidden states for one shard of a dump that goes on: what a reader asks before it trains on it."""

from pathlib import Path

import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.shard_layout import ShardPlan
from tasks.gates.gate import failed_paragraphs
from tasks.gates.hidden_states import shard_tables
from tasks.gates.stored_states import read_stored_shard
from tasks.gates.suite import judge


def require_sound(folder: Path, plan: ShardPlan, params: Params, contract: Contract, final_norm: torch.Tensor) -> None:
    """Every expectation on shards, samples and states holds for this one.

    Args:
        folder: of the split.
        plan: what the shard must hold.
        final_norm: weight of the target's norm before the head, [H].

    Raises:
        DraftlineError: names expectations, samples and the fix.
    """
    stored = read_stored_shard(folder, plan, contract, final_norm, params.dump.storage_dtype)
    failed = failed_paragraphs(judge(shard_tables(stored, contract, params)))
    if failed:
        raise DraftlineError(
            "\n".join([f"{folder / plan.name}: {len(failed)} expectations failed; it is not read.", *failed])
        )
