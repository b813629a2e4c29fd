"""The training loop: AdamW on the TTT loss, the best draft by predicted acceptance length kept."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tasks.common.contract import Contract
from tasks.common.draft import Eagle3Draft
from tasks.common.errors import DraftlineError
from tasks.common.params import TrainDraft
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.acceptance import measure
from tasks.train_draft.batch import Batch
from tasks.train_draft.checkpoints import Checkpoints
from tasks.train_draft.data import BatchStream, DraftData
from tasks.train_draft.evaluation import Evaluation, Step
from tasks.train_draft.gpu_memory import MemoryByTokens, capacity, held_bytes, out_of_memory, try_smaller
from tasks.train_draft.health import Health, target_entropy
from tasks.train_draft.interrupts import RETRY, Interrupted, Interrupts
from tasks.train_draft.meters import Meters, Reading
from tasks.train_draft.processes import Processes, SharedError, SharedExit
from tasks.train_draft.proposals import sample_proposals
from tasks.train_draft.replay import ReplayedStep
from tasks.train_draft.ring import RingStream
from tasks.train_draft.schedule import learning_rate
from tasks.train_draft.state import gathered, restore, training_state
from tasks.train_draft.step import TrainStep
from tasks.train_draft.target_head import RestrictedHead

# Reading a number waits for the device: on a GPU so many steps are read at once. The loss that is said after step n is the
# mean since the last multiple of this, wherever the run was stopped and saved in between.
_STEPS_A_READING = {"cpu": 1, "cuda": 10}


class Trainer:
    """Trains `draft` in place; iterate over `steps()`."""

    def __init__(
        self,
        draft: Eagle3Draft,
        head: RestrictedHead,
        vocab_map: VocabMap,
        batches: BatchStream | RingStream,
        heldout: DraftData,
        params: TrainDraft,
        checkpoints: Checkpoints,
        contract: Contract,
        processes: Processes,
    ):
        """Take up the newest checkpoint, if there is one."""
        self.draft, self.head, self.vocab_map, self.contract = draft, head, vocab_map, contract
        self.heldout, self.batches = heldout, batches
        self.params, self.checkpoints, self.processes = params, checkpoints, processes
        replayed = processes.size == 1 and torch.device(processes.device).type == "cuda"
        self.train_step = (ReplayedStep if replayed else TrainStep)(draft, head, params.recompute_activations)
        self.train_step.module = processes.joined_module(self.train_step.module)
        self.train_step.loss_gradient = processes.loss_gradient(self.train_step.module)
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=True
        )
        self.memory, self.meters = MemoryByTokens(), Meters(processes)
        self.health = Health(params, lambda: target_entropy(head, heldout), processes.gather)
        self.step = 0
        self.curve: list[dict] = []
        self._figures: dict[str, Any] = {}
        self._window: list[float] = []  # losses since the last multiple
        self._position = batches.state_dict()
        newest = checkpoints.newest(vocab_map.inputs_sha256) if processes.is_first else None
        if (step := processes.of_first(newest)) is not None:
            self._restore(checkpoints.load(step, contract))
            if processes.is_first:
                print(f"resuming after step {self.step} of {params.max_steps}", flush=True)

    def steps(self) -> Iterator[Step]:
        """Yield each reading until `max_steps`, checkpointing and evaluating on the way.

        Raises:
            DraftlineError: training on is of no use (health.py), a batch is too large, or the disk is full.
            SystemExit: with the code that says 'try again', after a signal; no step is lost.
        """
        batches = iter(self.batches)
        with Interrupts() as interrupts:
            if self._is_due(self.params.evaluate_every) and self._last_evaluated < self.step:  # what was interrupted
                yield Step(self.step, **self._figures, tokens=0, evaluation=self._evaluate(interrupts))
            while self.step < self.params.max_steps:
                of_step = self._next(batches, interrupts)
                asked = self.processes.any(interrupts.asked)
                self._one_step(of_step)
                stop, evaluate = asked(), self._is_due(self.params.evaluate_every)
                save = stop or evaluate or self._is_due(self.params.checkpoint_every)
                if not save and self.step % self._steps_a_reading:
                    continue
                reading = self._read()
                if save:
                    self._save()
                if stop:
                    raise SharedExit(RETRY)
                evaluation = self._evaluate(interrupts) if evaluate else None
                yield Step(self.step, **self._figures, tokens=reading.tokens, evaluation=evaluation)

    @property
    def best(self) -> dict:
        """The evaluation with the highest acceptance length predicted for `ttt_length` steps; the earlier of equals."""
        return max(self.curve, key=lambda point: point["heldout"]["predicted_accept_lengths"][-1])

    @property
    def _steps_a_reading(self) -> int:
        return _STEPS_A_READING[torch.device(self.processes.device).type]

    @property
    def _last_evaluated(self) -> int:
        return self.curve[-1]["step"] if self.curve else 0

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and (self.step % every == 0 or self.step == self.params.max_steps)

    def _next(self, batches: Iterator[Batch], interrupts: Interrupts) -> list[Batch]:
        """This process's batches of a step."""
        share = self.params.global_batch_size // self.processes.size
        try:
            with self._at_once(interrupts):
                return list(islice(batches, share))
        except torch.OutOfMemoryError:
            pass  # what it holds is freed with this block
        except Interrupted:
            if self.meters.unread:
                self._read()
            if self.step:
                self._save()
            raise SystemExit(RETRY) from None
        raise self._out_of_memory(None)

    def _one_step(self, batches: list[Batch]) -> None:
        try:
            self._update(batches)
            return
        except torch.OutOfMemoryError:
            pass  # what it holds is freed with this block
        raise self._out_of_memory(max(batches, key=lambda batch: batch.num_tokens))

    def _update(self, batches: list[Batch]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.params, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        positions = torch.stack([self.train_step.loss_positions(batch) for batch in batches]).sum(0)
        positions = self.processes.sum(positions)
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            with self.processes.accumulating(self.train_step.module, is_last), self.memory.observed(batch):
                _, sums = self.train_step(batch, positions)
            self.meters.add_batch(batch.samples.sample_ids, batch.num_tokens, sums)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.params.max_grad_norm)
        self.optimizer.step()
        self.step += 1
        self._position = self.batches.state_dict()
        self.meters.end_step(self.step, norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _out_of_memory(self, batch: Batch | None) -> DraftlineError:
        """The error for a batch that could not be computed, or not even be put beside the one that was."""
        self.optimizer.zero_grad(set_to_none=True)
        if not self.memory.peak and self.processes.size == 1:
            try_smaller(self.memory, self.heldout, self.params.batch_tokens, self.train_step)
        moments = 0 if self.optimizer.state else 2 * held_bytes(self.draft)
        fitting = self.memory.fitting_tokens(capacity(self.processes.device), still_to_come=moments)
        return out_of_memory(self.step + 1, batch, self.params, self.processes.size, fitting, self.memory.peak)

    def _read(self) -> Reading:
        """Look at every step since the last reading; none is saved unseen."""
        reading = self.meters.read()
        for vitals in reading.steps:
            self.health.examine(vitals)
            if (vitals.step - 1) % self._steps_a_reading == 0:
                self._window = []
            self._window.append(vitals.loss)
        self._figures = {
            "loss": fmean(self._window),
            "accuracy_by_position": reading.accuracy_by_position,
            "gradient_norm": reading.gradient_norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        return reading

    def _evaluate(self, interrupts: Interrupts) -> Evaluation:
        """Measure the draft, and keep it if none was better. This step is saved, so a signal may end it at once."""
        try:
            with self._at_once(interrupts), self.processes.whole(self.train_step.module):
                evaluation = self._measure()
        except Interrupted:
            raise SystemExit(RETRY) from None
        point = {"step": self.step, "loss": self._figures["loss"], "heldout": evaluation.heldout.to_dict()}
        self.curve.append(point)
        if self.best is self.curve[-1]:
            weights = gathered(self.draft.state_dict(), keep=self.processes.is_first)
            if self.processes.is_first:
                self.checkpoints.save_best(self.step, weights)
        return evaluation

    def _at_once(self, interrupts: Interrupts) -> AbstractContextManager[None]:
        """One process that is alone leaves as soon as it is asked to; of several all leave after the same step."""
        return interrupts.at_once() if self.processes.size == 1 else nullcontext()

    def _measure(self) -> Evaluation:
        ttt_length = self.params.ttt_length
        heldout = measure(self.draft, self.head, self.vocab_map, self.heldout, ttt_length, self.processes)
        if not math.isfinite(heldout.loss):
            raise SharedError(
                f"step {self.step}: the held-out loss is {heldout.loss}, the training loss {self._figures['loss']:.3g}: held-out states "
                f"hold NaN or Inf. `python -m tasks.gate_hidden_states` names the samples; dump them again."
            )
        shown = self.processes.is_first
        proposals = sample_proposals(self.draft, self.heldout, ttt_length, self.vocab_map) if shown else []
        return Evaluation(heldout, proposals)

    def _save(self) -> None:
        state = training_state(self.draft, self.optimizer, keep=self.processes.is_first)
        if self.processes.is_first:
            state |= {
                "step": self.step,
                "data": self._position,
                "curve": self.curve,
                "figures": self._figures,
                "window": self._window,
                "health": self.health.state_dict(),
                "best_step": self.best["step"] if self.curve else None,
                "vocab_map_sha256": self.vocab_map.inputs_sha256,
                "contract": self.contract.model_dump(mode="json"),
            }
            self.checkpoints.save(self.step, state)

    def _restore(self, state: dict) -> None:
        restore(state, self.draft, self.optimizer)
        self.step, self.curve = state["step"], state["curve"]
        self._figures, self._window = state["figures"], state["window"]
        self._position = state["data"]
        self.batches.load_state_dict(state["data"])
        self.health.load_state_dict(state["health"])
