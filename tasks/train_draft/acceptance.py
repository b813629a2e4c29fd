"""How good the draft is on held-out answers: accuracy on given tokens, acceptance on its own."""

from dataclasses import asdict, dataclass
from itertools import chain

import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts, walk
from tasks.train_draft.data import DraftData
from tasks.train_draft.loss import STEP_WEIGHT
from tasks.train_draft.processes import Processes
from tasks.train_draft.step import TttLoss
from tasks.train_draft.target_head import RestrictedHead


@dataclass(frozen=True)
class Acceptance:
    """Figures over the held-out answers.

    Attributes:
        loss: the training loss there, nats.
        accuracy_by_position: of TTT step i on teacher-forced tokens: argmax equal to the target's, misses outside the
            draft vocabulary included.
        predicted_accept_lengths: 1 + correct drafts / rounds of the walk (contract, section 4) with chains of 1, 2, ... K
            steps. A draft is kept by the last: how many of its steps will be served is not known here.
        survival: of the walk with K steps, share of the rounds in which the drafts of positions 0..i were all right.
        rounds: of that walk.
        uniform: 1 + mean c_t over every position, K steps: biased upward, for comparison with papers' figures only.
    """

    loss: float
    accuracy_by_position: list[float]
    predicted_accept_lengths: list[float]
    survival: list[float]
    rounds: int
    uniform: float

    def to_dict(self) -> dict:
        return asdict(self)


@torch.no_grad()
def measure(
    draft: Eagle3Draft,
    head: RestrictedHead,
    vocab_map: VocabMap,
    heldout: DraftData,
    ttt_length: int,
    processes: Processes | None = None,
) -> Acceptance:
    """Evaluate a draft.

    Args:
        ttt_length: K, steps on given tokens and on the draft's own.
        processes: that share the answers; each of them takes part, and has the figures over all.
    """
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    sums = torch.zeros(4, ttt_length, dtype=torch.float64)
    ttt_loss = TttLoss(draft, head)
    everywhere: list[int] = []
    rounds: list[list[int]] = [[] for _ in range(ttt_length)]  # with chains of 1, 2, ... K steps
    for indices in heldout.batches(heldout.usable)[rank::size]:
        batch = heldout.read(indices)
        _, found = ttt_loss(batch, batch.lessons.loss_positions)
        sums += torch.stack([found.loss, found.loss_positions, found.supervised, found.correct]).cpu()
        rows = round_starts(batch.samples)
        if len(rows):
            proposed = draft.propose(batch.samples, rows, ttt_length, vocab_map)
            rows, correct = rows.cpu(), correct_drafts(batch.samples, rows, proposed).cpu()
            everywhere += correct.tolist()
            # A shorter chain is the beginning of a longer one, but its rounds start at other positions.
            for steps, of_chain in enumerate(rounds, 1):
                of_chain += walk(rows, correct.clamp(max=steps))
    if processes:
        shares = processes.gather((sums, everywhere, rounds))
        sums = sum(of_share for of_share, _, _ in shares)
        everywhere = list(chain.from_iterable(of_share for _, of_share, _ in shares))
        rounds = [list(chain.from_iterable(of_chain)) for of_chain in zip(*(share[2] for share in shares), strict=True)]
    loss, positions, supervised, right = sums
    mean_losses = (loss / positions.clamp(min=1)).tolist()
    return Acceptance(
        loss=sum(STEP_WEIGHT**i * loss for i, loss in enumerate(mean_losses)),
        accuracy_by_position=(right / supervised.clamp(min=1)).tolist(),
        predicted_accept_lengths=[1 + _mean(of_chain) for of_chain in rounds],
        survival=[_mean([accepted > i for accepted in rounds[-1]]) for i in range(ttt_length)],
        rounds=len(rounds[-1]),
        uniform=1 + _mean(everywhere),
    )


def _mean(values: list) -> float:
    return sum(values) / max(len(values), 1)
