"""Train while the dump goes on: the ring that `dump.ahead_shards` bounds -> artifacts/draft.

    python -m tasks.dump_hidden_states      # with dump.ahead_shards; and beside it, once the held-out states are there,
    python -m tasks.train_draft.online      # as tasks.train_draft, whose result and report it writes

For targets whose states no disk can hold. It stands outside DVC: nothing stays that could be versioned.
"""

from pathlib import Path

import torch

from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.planned_shards import plan_shards
from tasks.common.stage import run_stage
from tasks.common.target import model_folder, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.common.tracking import Tracker
from tasks.gates.shard import ShardGate
from tasks.train_draft.__main__ import train
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.induction import TrainingStates
from tasks.train_draft.processes import Processes
from tasks.train_draft.ring import RingStream
from tasks.train_draft.source import TRAIN, Summary
from tasks.train_draft.target_head import TargetHead


class RingSource:
    """Shards that come and go (`dump.ahead_shards`): what is not in them is known from the answers."""

    def __init__(self, params: Params):
        """
        Raises:
            DraftlineError: the held-out states are not there yet.
        """
        contract, norm = target_contract(params.contract), TargetWeights(model_folder(params.target)).final_norm()
        self._params, self.contract = params, contract
        settings = params.train_draft
        self._stream = RingStream(
            TRAIN,
            lambda: plan_shards("train", params, contract),
            ShardGate(params, contract, norm, HiddenStates(HIDDEN_STATES / "heldout")),
            seed=settings.seed,
            batch_tokens=settings.batch_tokens,
        )

    def summary(self) -> Summary:
        counts = torch.zeros(self.contract.vocab_size, dtype=torch.int64)
        identity, samples, tokens = [], 0, 0
        for plan in plan_shards("train", self._params, self.contract):
            identity.append(plan.sha256)
            samples += len(plan.ids)
            tokens += plan.tokens
            written = torch.from_numpy(plan.input_ids[plan.loss_mask.astype(bool)])
            counts += torch.bincount(written, minlength=len(counts))
        return Summary(identity, counts, samples, tokens)

    def first_states(self) -> TrainingStates:
        return self._stream.first_states()

    def batches(self, head: TargetHead, cache: Path, form: BatchForm, processes: Processes) -> RingStream:
        return self._stream.shared(head, form, processes, self._params.train_draft.global_batch_size)


def main(params: Params, tracker: Tracker) -> None:
    train(params, tracker, RingSource)


if __name__ == "__main__":
    run_stage("train_draft", main)
