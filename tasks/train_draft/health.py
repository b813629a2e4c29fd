"""Is this still a run worth its GPU hours? What stops it says on which samples, the likely cause and what to change."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tasks.common.params import TrainDraft
from tasks.train_draft.data import DraftData
from tasks.train_draft.loss import STEP_WEIGHT
from tasks.train_draft.processes import SharedError
from tasks.train_draft.target_head import RestrictedHead

# A gradient that is clipped does no harm once: a run explodes when so many steps in a row lie so far above the median of
# those before. Sound runs have single spikes, and norms that drift by a factor of a few within the window.
_WINDOW, _MIN_NORMS = 200, 20
_EXPLODING_STEPS, _EXPLOSION = 5, 50.0
# So many steps in a row whose loss is so many times that of the first few: worse than not to train.
_DIVERGED_STEPS, _DIVERGED, _FIRST = 50, 1.5, 5
# With so many supervised positions chance alone does not put all of their targets outside the draft vocabulary.
_ENOUGH_POSITIONS = 30
# Losses are looked at after so many steps, and each time that there are twice as many: their first half with their second.
_FIRST_LOOK = 100
# A loss moves once it has fallen by such a share. It stands still if at its pace the whole run would close less than such a
# share of the way to the entropy of the targets, unless so few nats a position are left of it.
_MOVES, _STANDS, _NO_ROOM = 0.01, 0.05, 0.05
# One-sided 99.9 % of a normal distribution.
_Z = 3.1
_ENTROPY_SAMPLES, _ENTROPY_POSITIONS = 8, 512


@dataclass(frozen=True)
class BatchVitals:
    """One batch that this process trained on; `loss` is summed over positions and TTT steps, nats."""

    sample_ids: tuple[str, ...]
    loss: float


@dataclass(frozen=True)
class Vitals:
    """One optimiser step over all processes.

    Attributes:
        loss: weighted TTT loss, nats.
        gradient_norm: before it is clipped.
        supervised, loss_positions: of TTT step 0.
        batches: of this process.
    """

    step: int
    loss: float
    gradient_norm: float
    supervised: int
    loss_positions: int
    batches: tuple[BatchVitals, ...]


@dataclass(frozen=True)
class _Explosion:
    """Where norms began to lie far above the usual, with the samples of all processes: the first one alone saves."""

    step: int
    samples: str


class Health:
    """Looks at every step, in order; what it remembers travels with the checkpoint."""

    def __init__(self, params: TrainDraft, entropy: Callable[[], float], gather: Callable[[Any], list[Any]]):
        """
        Args:
            entropy: of the target's distribution over the draft vocabulary, nats a position; asked for seldom.
            gather: what every process has to say, given what this one has (`Processes.gather`).
        """
        self._entropy, self._gather = entropy, gather
        self._weights = sum(STEP_WEIGHT**i for i in range(params.ttt_length))
        self._max_steps = params.max_steps
        self._next_look = max(_FIRST_LOOK, 2 * params.warmup_steps)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._exploding: _Explosion | None = None
        self._first: list[float] = []
        self._above = 0  # steps in a row
        self._losses: list[float] | None = []  # until they have moved

    def examine(self, vitals: Vitals) -> None:
        """Take in one step.

        Raises:
            SharedError: training on is of no use.
        """
        self._require_positions(vitals)
        self._require_finite(vitals)
        self._require_no_explosion(vitals)
        self._require_no_divergence(vitals)
        self._require_progress(vitals)

    def state_dict(self) -> dict[str, Any]:
        """What the verdict on later steps depends on."""
        return {
            "norms": list(self._norms),
            "exploding": self._exploding and asdict(self._exploding),
            "first": self._first,
            "above": self._above,
            "losses": self._losses,
            "next_look": self._next_look,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self._norms = deque(state["norms"], maxlen=_WINDOW)
        self._exploding = state["exploding"] and _Explosion(**state["exploding"])
        self._first, self._above = state["first"], state["above"]
        self._losses, self._next_look = state["losses"], state["next_look"]

    def _require_positions(self, vitals: Vitals) -> None:
        if not vitals.supervised:
            raise SharedError(
                f"step {vitals.step}: no position is supervised in samples {self._samples(vitals)}: their loss masks are 0 beyond "
                f"the second token, so there is nothing to train on. Look at their mask density in "
                f"reports/gates/hidden_states.html; a chat template without generation tags is the usual cause."
            )
        if not vitals.loss_positions and vitals.supervised >= _ENOUGH_POSITIONS:
            raise SharedError(
                f"step {vitals.step}: none of the {vitals.supervised} supervised positions gives loss in samples "
                f"{self._samples(vitals)}: what the target says there is not in the draft vocabulary. Raise "
                f"train_draft.draft_vocab_size, or look whether these samples are of another language than the rest."
            )

    def _require_finite(self, vitals: Vitals) -> None:
        for name, value in (("loss", vitals.loss), ("norm of the gradient", vitals.gradient_norm)):
            if not math.isfinite(value):
                before = f"{statistics.median(self._norms):.2g}" if self._norms else "not known yet"
                raise SharedError(
                    f"step {vitals.step}: the {name} is {value} on samples {self._samples(vitals)}, which are packed together, so that one "
                    f"spoils all. States that are NaN, Inf or huge are the likely cause where the norm of the gradient was steady before "
                    f"(median {before}): `python -m tasks.gate_hidden_states` reads them all again and names sample and shard; dump "
                    f"that shard again. If it passes, lower train_draft.learning_rate."
                )

    def _require_no_explosion(self, vitals: Vitals) -> None:
        usual = statistics.median(self._norms) if len(self._norms) >= _MIN_NORMS else math.inf
        if vitals.gradient_norm <= _EXPLOSION * usual:
            self._exploding = None
            self._norms.append(vitals.gradient_norm)
            return
        first = self._exploding = self._exploding or _Explosion(vitals.step, self._samples(vitals))
        if vitals.step - first.step + 1 == _EXPLODING_STEPS:
            raise SharedError(
                f"step {vitals.step}: the norm of the gradient is {vitals.gradient_norm:.3g}, more than {_EXPLOSION:.0f} times the "
                f"usual {usual:.3g} for {_EXPLODING_STEPS} steps in a row, since step {first.step} on samples "
                f"{first.samples}; the loss is {vitals.loss:.3g}. The draft diverges: lower train_draft.learning_rate or "
                f"lengthen train_draft.warmup_steps, and look at the states of these samples."
            )

    def _require_no_divergence(self, vitals: Vitals) -> None:
        if len(self._first) < _FIRST:
            self._first.append(vitals.loss)
            return
        first = statistics.fmean(self._first)
        self._above = self._above + 1 if vitals.loss > _DIVERGED * first else 0
        if self._above == _DIVERGED_STEPS:
            raise SharedError(
                f"step {vitals.step}: the loss is {vitals.loss:.3g}, and for {_DIVERGED_STEPS} steps it was more than {_DIVERGED} times "
                f"the {first:.3g} that it began with. Last samples: {self._samples(vitals)}. The draft diverges: lower "
                f"train_draft.learning_rate or lengthen train_draft.warmup_steps."
            )

    def _require_progress(self, vitals: Vitals) -> None:
        if self._losses is None:
            return
        self._losses.append(vitals.loss)
        number = len(self._losses)
        if number < self._next_look:
            return
        self._next_look *= 2
        before, since = self._losses[: number // 2], self._losses[number // 2 :]
        start, now = statistics.fmean(before), statistics.fmean(since)
        error = _Z * math.sqrt(statistics.variance(before) / len(before) + statistics.variance(since) / len(since))
        if start - now - error > _MOVES * start:
            self._losses = None
            return
        pace = (abs(start - now) + error) * self._max_steps / len(since)  # of the whole run, if chance was against it
        if pace > _STANDS * start:
            return  # the entropy can only make the way shorter
        floor = self._weights * self._entropy()
        if start - floor > _NO_ROOM * self._weights and pace < _STANDS * (start - floor):
            raise SharedError(
                f"step {vitals.step}: the loss does not move: {start:.3f} over the first {len(before)} steps, {now:.3f} over the "
                f"{len(since)} since, where the target's own entropy is {floor:.3f}. Last samples: {self._samples(vitals)}. Is "
                f"train_draft.learning_rate too low or far too high? If not, states and tokens do not belong together: run "
                f"`python -m tasks.gate_hidden_states`, which replays samples through the target."
            )

    def _samples(self, vitals: Vitals) -> str:
        """Of the batches whose own loss is not finite, else of all; every process must ask."""
        batches = [batch for own in self._gather(vitals.batches) for batch in own]
        blamed = [batch for batch in batches if not math.isfinite(batch.loss)] or batches
        return ", ".join(name for batch in blamed for name in batch.sample_ids)


@torch.no_grad()
def target_entropy(head: RestrictedHead, heldout: DraftData) -> float:
    """Mean entropy in nats of what the draft learns to imitate, over the first held-out answers: no loss is below it."""
    samples = heldout.read(heldout.usable[:_ENTROPY_SAMPLES].tolist()).samples
    sources = samples.ahead(1)[samples.supervised(0)][:_ENTROPY_POSITIONS]
    shares = head.logits(samples.last[sources]).float().softmax(-1)
    return torch.special.entr(shares).sum(-1).mean().item()
