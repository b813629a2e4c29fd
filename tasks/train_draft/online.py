"""Train while the dump goes on: the ring that `dump.ahead_shards` bounds -> artifacts/draft.

    python -m tasks.dump_hidden_states      # with dump.ahead_shards; and beside it, once the held-out states are there,
    python -m tasks.train_draft.online      # as tasks.train_draft, whose result and report it writes

For targets whose states no disk can hold. It stands outside DVC: nothing stays that could be versioned.
"""

from pathlib import Path

import torch

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, MANIFEST, HiddenStates
from tasks.common.params import PARAMS, Params
from tasks.common.planned_shards import plan_shards
from tasks.common.shard import shard_is_done
from tasks.common.shard_layout import ShardPlan
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

HELDOUT = HIDDEN_STATES / "heldout"


class RingSource:
    """Shards that come and go (`dump.ahead_shards`): what is not in them is known from the answers."""

    def __init__(self, params: Params):
        """
        Raises:
            DraftlineError: train is no ring, the held-out states are not there yet, or the gate refuses a shard of them.
        """
        if params.dump.ahead_shards is None or (TRAIN / MANIFEST).exists():
            found = "dump.ahead_shards is null" if params.dump.ahead_shards is None else f"{TRAIN} is a whole split"
            raise DraftlineError(
                f"{PARAMS}: {found}, and this would free each of its shards once it is read. Train on a dump that stays with "
                f"`dvc repro`; to train beside one that goes on, set dump.ahead_shards and start "
                f"`python -m tasks.dump_hidden_states`."
            )
        contract, norm = target_contract(params.contract), TargetWeights(model_folder(params.target)).final_norm()
        self._params, self.contract = params, contract
        settings = params.train_draft
        heldout_plans = list(plan_shards("heldout", params, contract))
        gate = ShardGate(params, contract, norm, _open_heldout(heldout_plans))
        for plan in heldout_plans:  # no stage of DVC has judged them
            gate(HELDOUT, plan)
        self._stream = RingStream(
            TRAIN,
            lambda: plan_shards("train", params, contract),
            gate,
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


def _open_heldout(plans: list[ShardPlan]) -> HiddenStates:
    is_there = (HELDOUT / MANIFEST).exists() and all(shard_is_done(HELDOUT, plan.name, plan.sha256) for plan in plans)
    states = HiddenStates(HELDOUT) if is_there else None
    if states is None or [shard["name"] for shard in states.shards] != [plan.name for plan in plans]:
        raise DraftlineError(
            f"{HELDOUT}: the held-out states of these answers and this params.yaml are not there yet. Start the dump, "
            f"`python -m tasks.dump_hidden_states`, wait until it dumps train, then start this again."
        )
    return states


def main(params: Params, tracker: Tracker) -> None:
    train(params, tracker, RingSource)


if __name__ == "__main__":
    run_stage("train_draft", main)
