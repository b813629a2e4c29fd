"""Train the EAGLE-3 draft on dumped hidden states: artifacts/hidden_states -> artifacts/draft.

    python -m tasks.train_draft                                  # params.yaml, section train_draft -> reports/train_draft.json
    torchrun --nproc-per-node 8 -m tasks.train_draft             # global_batch_size a multiple of 8; parallel: ddp or fsdp
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m tasks.train_draft   # on each

A run that was killed or stopped goes on from its newest checkpoint, on as many processes as there are then; with other
settings or other states it starts anew (infra/docs/training.md).
"""

from contextlib import ExitStack

from tasks.common.files import ARTIFACTS, REPORTS, write_json
from tasks.common.locks import alone_on
from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker

REPORT = REPORTS / "train_draft.json"


def main(params: Params, tracker: Tracker) -> None:
    from tasks.train_draft.source import DumpedSource

    train(params, tracker, DumpedSource)


def train(params: Params, tracker: Tracker, open_source) -> None:
    """Train on the states of `open_source(params)` (source.py), unless that is done (finished.py)."""
    from tasks.train_draft.finished import FINISHED, finished_report, write_finished
    from tasks.train_draft.interrupts import retryable
    from tasks.train_draft.live import show_steps
    from tasks.train_draft.prepare import prepare_training, write_result
    from tasks.train_draft.processes import Processes

    folder = ARTIFACTS / "draft"
    refusal = f"{folder}: another training ({{}}) works there. Wait until it ends, or stop it: it may be what a killed `dvc repro` left."
    with retryable(), Processes.joined(params) as processes, ExitStack() as stack:
        if processes.is_first:
            stack.enter_context(alone_on(folder.with_suffix(".lock"), refusal))
        report = processes.of_first(finished_report(params, folder) if processes.is_first else None)
        if report:
            if processes.is_first:
                _record(report, tracker)
                print(
                    f"{folder}: trained already, with these settings, states, code and versions; {REPORT} is written again. To train "
                    f"anew, delete {folder / FINISHED}."
                )
            return
        trainer, facts = prepare_training(params, folder, open_source, processes)
        if not processes.is_first:
            for _ in trainer.steps():
                pass
            return
        show_steps(trainer, params, tracker)
        report = write_result(trainer, folder, facts)
        _record(report, tracker)
        write_finished(folder, trainer.checkpoints.key, report)
        trainer.checkpoints.remove()
        lengths = report["predicted_accept_lengths"]
        print(
            f"{folder}: predicted acceptance length {lengths[-1]:.3f} with chains of {len(lengths)} steps, after training step "
            f"{report['step']}"
        )


def _record(report: dict, tracker: Tracker) -> None:
    write_json(REPORT, report)
    tracker.log_artifact(REPORT)


if __name__ == "__main__":
    run_stage("train_draft", main)
