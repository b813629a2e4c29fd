"""The gate on hidden states for shards of a dump that goes on: what a reader asks of each before it trains on it."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.params import Params
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.gates.gate import failed_paragraphs
from tasks.gates.hidden_states import DENSE_SHARE, replay_table, shard_tables, state_suite
from tasks.gates.norms import sample_limits
from tasks.gates.replay import Replay, as_table
from tasks.gates.stored_states import StoredStates, read_stored_shard
from tasks.gates.suite import judge

# Fewer samples say nothing of a share.
_SAMPLES_FOR_A_SHARE = 200


class ShardGate:
    """Judges one shard after the other: `gate(folder, plan)`, the `check` of ring.consume.

    A shard alone is no population: norms are held against the held-out split, which is dumped first, and the share of
    samples with few assistant tokens is that of all shards so far. The contract is part of each shard's plan hash.
    """

    def __init__(self, params: Params, contract: Contract, final_norm: torch.Tensor, heldout: HiddenStates):
        """
        Args:
            final_norm: weight of the target's norm before the head, [H].
            heldout: closed. No other gate judges it while train comes and goes: give this one its shards first.
        """
        self._params, self._contract, self._final_norm = params, contract, final_norm
        self._suite = state_suite(params, contract, sample_limits(heldout.table.to_pandas()), whole=False)
        self._replay = Replay(params, contract)
        self._samples = self._thin = 0

    def __call__(self, folder: Path, plan: ShardPlan) -> None:
        """Every expectation holds for this shard; one sample is replayed, unless gates.replay_samples is 0.

        Raises:
            DraftlineError: names expectations, samples and the fix.
        """
        storage_dtype = self._params.dump.storage_dtype
        stored = read_stored_shard(folder, plan, self._contract, self._final_norm, storage_dtype)
        failed = failed_paragraphs(judge(shard_tables(stored, self._suite)))
        if not failed and self._params.gates.replay_samples:
            rows = as_table(list(self._replayed(folder, plan, stored.states)))
            failed = failed_paragraphs(judge([replay_table(rows, self._params)]))
        if failed:
            raise DraftlineError(
                "\n".join([f"{folder / plan.name}: {len(failed)} expectations failed; it is not read.", *failed])
            )
        self._require_density(folder / plan.name, stored)

    def _replayed(self, folder: Path, plan: ShardPlan, states: pd.DataFrame) -> Iterator[dict]:
        """Its longest sample through the target."""
        index = int(states["tokens"].argmax())
        start, end = plan.offsets[index : index + 2].tolist()
        shard = StoredShard(folder / f"{plan.name}.safetensors")
        sample = Sample(
            plan.ids[index], shard.input_ids[start:end], shard.loss_mask[start:end], *shard.states(start, end)
        )
        return self._replay.rows(sample)

    def _require_density(self, path: Path, stored: StoredStates) -> None:
        least = self._params.gates.min_mask_density
        self._samples += len(stored.states)
        self._thin += int((stored.states["mask_density"] < least).sum())
        if self._samples >= _SAMPLES_FOR_A_SHARE and self._thin > (1 - DENSE_SHARE) * self._samples:
            raise DraftlineError(
                f"{path}: of {self._samples} samples up to this shard {self._thin} have less than gates.min_mask_density {least} of "
                f"their tokens from the assistant, expected at most {1 - DENSE_SHARE:.0%}. Raise regenerate.max_new_tokens, lower "
                f"prompts.max_prompt_tokens, or lower gates.min_mask_density."
            )
