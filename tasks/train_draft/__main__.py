"""Train the EAGLE-3 draft on dumped hidden states: artifacts/hidden_states -> artifacts/draft.

    python -m tasks.train_draft           # params.yaml, section train_draft -> reports/train_draft.json

A killed run goes on from its newest checkpoint; with other settings or other states it starts anew.
"""

import time

from tasks.common.files import ARTIFACTS, REPORTS, write_json
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker

REPORT = REPORTS / "train_draft.json"


def main(params: Params, tracker: Tracker) -> None:
    from tasks.train_draft.source import DumpedSource

    train(params, tracker, DumpedSource)


def train(params: Params, tracker: Tracker, open_source) -> None:
    """Train on the states of `open_source(params)` (source.py)."""
    from tasks.train_draft.prepare import prepare_training, write_result

    folder = ARTIFACTS / "draft"
    trainer, facts = prepare_training(params, folder, open_source)
    tokens, began = 0, time.monotonic()
    total, done = params.train_draft.max_steps, trainer.step
    with progress(total=total, initial=done, desc="training", unit="step") as bar:
        for step in trainer.steps():
            tokens += step.tokens
            speed = tokens / (time.monotonic() - began)
            accuracy = " ".join(f"{value:.2f}" for value in step.accuracy_by_position)
            bar.set_postfix_str(f"loss {step.loss:.2f}, accuracy {accuracy}, {speed:.0f} tok/s", refresh=False)
            bar.update()
            metrics = {"train/loss": step.loss, "train/tokens_per_s": speed}
            metrics |= {f"train/accuracy_position_{i}": value for i, value in enumerate(step.accuracy_by_position)}
            if step.heldout:
                print(
                    f"step {step.step}: held-out loss {step.heldout.loss:.3f}, "
                    f"predicted acceptance length {step.heldout.predicted_accept_length:.3f}",
                    flush=True,
                )
                metrics["heldout/loss"] = step.heldout.loss
                metrics["heldout/predicted_accept_length"] = step.heldout.predicted_accept_length
            tracker.log_metrics(metrics, step.step)  # one transaction a step
    report = write_result(trainer, folder, facts)
    write_json(REPORT, report)
    trainer.checkpoints.remove()
    tracker.log_artifact(REPORT)
    print(f"{folder}: predicted acceptance length {report['predicted_accept_length']:.3f} at step {report['step']}")


if __name__ == "__main__":
    run_stage("train_draft", main)
