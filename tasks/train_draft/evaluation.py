"""What a reading and an evaluation give to who looks on."""

from dataclasses import dataclass

from tasks.train_draft.acceptance import Acceptance
from tasks.train_draft.proposals import Proposal


@dataclass(frozen=True)
class Evaluation:
    """Figures over the held-out answers; some of what was proposed there, in the first process alone."""

    heldout: Acceptance
    proposals: list[Proposal]


@dataclass(frozen=True)
class Step:
    """What the steps since the last one gave: on a CPU one, on a GPU a few.

    Attributes:
        step: the last of them.
        loss: weighted TTT loss, nats: the mean over a window that the step's number alone decides (`Trainer`), so that a
            run that was resumed says the same.
        accuracy_by_position: on teacher-forced tokens, one per TTT step.
        gradient_norm: the largest, before it was clipped.
        evaluation: where this step was evaluated.
    """

    step: int
    loss: float
    accuracy_by_position: list[float]
    gradient_norm: float
    learning_rate: float
    tokens: int
    evaluation: Evaluation | None

    @property
    def heldout(self) -> Acceptance | None:
        return self.evaluation.heldout if self.evaluation else None
