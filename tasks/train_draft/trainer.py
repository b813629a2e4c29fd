"""The training loop: AdamW on the TTT loss, the best draft by predicted acceptance length kept."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.errors import DraftlineError
from tasks.common.params import TrainDraft
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.acceptance import Acceptance, measure
from tasks.train_draft.checkpoints import Checkpoints
from tasks.train_draft.data import Batch, BatchStream, DraftData
from tasks.train_draft.ring import RingStream
from tasks.train_draft.step import TrainStep
from tasks.train_draft.target_head import RestrictedHead


@dataclass(frozen=True)
class Step:
    """What one optimiser step gave.

    Attributes:
        loss: weighted TTT loss of the batch, nats.
        accuracy_by_position: on teacher-forced tokens, one per TTT step.
        heldout: figures over the held-out answers, where this step was evaluated.
    """

    step: int
    loss: float
    accuracy_by_position: list[float]
    tokens: int
    heldout: Acceptance | None


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
        num_steps: int,
        checkpoints: Checkpoints,
    ):
        """Take up the newest checkpoint, if there is one.

        Args:
            num_steps: tokens drafted a round when served; predicted acceptance length is for this chain.
        """
        self.draft, self.head, self.vocab_map = draft, head, vocab_map
        self.train_step = TrainStep(draft, head, params.recompute_activations)
        self.heldout = heldout
        self.params, self.num_steps, self.checkpoints = params, num_steps, checkpoints
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=True
        )
        self.batches = batches
        self.step = 0
        self.curve: list[dict] = []
        if state := checkpoints.newest(vocab_map.inputs_sha256):
            self._restore(state)
            print(f"resuming after step {self.step} of {params.max_steps}")

    def steps(self) -> Iterator[Step]:
        """Yield each step until `max_steps`, checkpointing and evaluating on the way.

        Raises:
            DraftlineError: the loss is NaN or Inf; names the samples of the batch.
        """
        batches = iter(self.batches)
        while self.step < self.params.max_steps:
            result = self._one_step(next(batches))
            if result.heldout:
                self._keep_if_best(result)
            if self.step % self.params.checkpoint_every == 0 and self.step < self.params.max_steps:
                self.checkpoints.save(self.step, self._state())
            yield result

    @property
    def best(self) -> dict:
        """The evaluation with the highest predicted acceptance length, with its step; the earlier of equals."""
        return max(self.curve, key=lambda point: point["heldout"]["predicted_accept_length"])

    def _one_step(self, batch: Batch) -> Step:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = self.train_step(batch)
        self._require_finite("loss", loss, batch)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.params.max_grad_norm)
        self._require_finite("norm of the gradient", norm, batch)
        self.optimizer.step()
        self.step += 1
        due = self.step % self.params.evaluate_every == 0 or self.step == self.params.max_steps
        return Step(
            step=self.step,
            loss=loss.item(),
            accuracy_by_position=(sums.correct / sums.supervised.clamp(min=1)).tolist(),
            tokens=batch.num_tokens,
            heldout=self._measure() if due else None,
        )

    def _require_finite(self, name: str, value: torch.Tensor, batch: Batch) -> None:
        if not torch.isfinite(value):
            raise DraftlineError(
                f"step {self.step + 1}: the {name} is {value.item()} on samples {', '.join(batch.samples.sample_ids)}. Look "
                f"at their rows in reports/gates/hidden_states.html; if their states are sound, lower "
                f"train_draft.learning_rate."
            )

    def _learning_rate(self) -> float:
        """Linear warm-up, then linear decay to zero at `max_steps`."""
        warmup, total = self.params.warmup_steps, self.params.max_steps
        if self.step < warmup:
            return self.params.learning_rate * (self.step + 1) / warmup
        return self.params.learning_rate * (total - self.step) / max(total - warmup, 1)

    def _measure(self) -> Acceptance:
        return measure(self.draft, self.head, self.vocab_map, self.heldout, self.params.ttt_length, self.num_steps)

    def _keep_if_best(self, result: Step) -> None:
        self.curve.append({"step": result.step, "loss": result.loss, "heldout": result.heldout.to_dict()})
        if self.best is self.curve[-1]:
            self.checkpoints.save_best(result.step, self.draft)

    def _state(self) -> dict:
        return {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "data": self.batches.state_dict(),
            "curve": self.curve,
            "best_step": self.best["step"] if self.curve else None,
            "vocab_map_sha256": self.vocab_map.inputs_sha256,
        }

    def _restore(self, state: dict) -> None:
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.batches.load_state_dict(state["data"])
        self.curve = state["curve"]
