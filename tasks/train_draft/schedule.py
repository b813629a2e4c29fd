"""The learning rate of each step. It follows from the step alone, so a checkpoint need not hold it."""

from tasks.common.params import TrainDraft


def learning_rate(params: TrainDraft, step: int) -> float:
    """Linear warm-up, then linear decay to zero at `max_steps`.

    Args:
        step: optimiser steps that were made before.
    """
    if step < params.warmup_steps:
        return params.learning_rate * (step + 1) / params.warmup_steps
    return params.learning_rate * (params.max_steps - step) / max(params.max_steps - params.warmup_steps, 1)
