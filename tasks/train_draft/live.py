"""What is seen while training goes on: a line of progress, curves and a table of proposals in MLflow."""

import time

from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.target import load_tokenizer
from tasks.common.tracking import Tracker
from tasks.train_draft.evaluation import Step
from tasks.train_draft.proposals import as_columns
from tasks.train_draft.trainer import Trainer


def show_steps(trainer: Trainer, params: Params, tracker: Tracker) -> None:
    """Train to the end, showing each step."""
    tokens, began, predicted, tokenizer = 0, time.monotonic(), "", load_tokenizer()
    with progress(total=params.train_draft.max_steps, initial=trainer.step, desc="training", unit="step") as bar:
        for step in trainer.steps():
            tokens += step.tokens
            numbers = _numbers(step) | {"train/tokens_per_s": tokens / (time.monotonic() - began)}
            memory = ""
            if trainer.memory.peak:
                numbers["train/gpu_memory_gib"] = trainer.memory.peak / 2**30
                memory = f", {numbers['train/gpu_memory_gib']:.1f} GiB"
            if step.heldout:
                lengths = step.heldout.predicted_accept_lengths
                predicted = f", predicted AL {lengths[-1]:.2f}"
                print(
                    f"step {step.step}: held-out loss {step.heldout.loss:.3f}, "
                    f"predicted acceptance length {lengths[-1]:.3f} with chains of {len(lengths)} steps",
                    flush=True,
                )
            accuracy = " ".join(f"{value:.2f}" for value in step.accuracy_by_position)
            speed = numbers["train/tokens_per_s"]
            bar.set_postfix_str(
                f"loss {step.loss:.2f}, accuracy {accuracy}{predicted}, {speed:.0f} tok/s{memory}", refresh=False
            )
            bar.update(step.step - bar.n)
            tracker.log_metrics(numbers, step.step)  # one transaction
            if step.evaluation:
                tracker.log_table(as_columns(step.step, step.evaluation.proposals, tokenizer), "proposals")


def _numbers(step: Step) -> dict[str, float]:
    """Names in MLflow; '/' makes a section."""
    numbers = {
        "train/loss": step.loss,
        "train/gradient_norm": step.gradient_norm,
        "train/learning_rate": step.learning_rate,
    }
    numbers |= {f"train/accuracy_position_{i}": value for i, value in enumerate(step.accuracy_by_position)}
    if step.heldout:
        numbers["heldout/loss"] = step.heldout.loss
        lengths = step.heldout.predicted_accept_lengths
        numbers |= {f"heldout/predicted_accept_length/{steps}_steps": value for steps, value in enumerate(lengths, 1)}
        numbers |= {f"heldout/survival_position_{i}": value for i, value in enumerate(step.heldout.survival)}
    return numbers
