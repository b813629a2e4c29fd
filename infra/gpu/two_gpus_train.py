"""The draft trained by one process and by two, with DDP and with FSDP2, and a run that was saved by two resumed by one.

    torchrun --nproc-per-node 2 -m infra.gpu.two_gpus_train ddp.yaml --draft ddp --name ddp --until 120    # one of the runs

A step takes two packed batches, whoever computes them: one process one after the other, two processes one each.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from infra.gpu.two_gpus_runs import Found, module_command, run
from infra.gpu.two_gpus_settings import GPUS, Settings, Sizes, text_sequences, write_params
from tasks.common.files import ARTIFACTS, read_json, write_json, write_jsonl
from tasks.common.params import load_params
from tasks.common.responses import RESPONSES, Response
from tasks.common.target import TARGET, load_tokenizer
from tasks.dump_hidden_states.dump import dump
from tasks.prepare_target.prepare import prepare_target
from tasks.train_draft.prepare import prepare_training
from tasks.train_draft.processes import Processes
from tasks.train_draft.step import TrainStep

ONE, KERNELS, RESUMED = "one process", "one process, kernel by kernel", "two with DDP, resumed by one"
DDP, FSDP = "two with DDP", "two with FSDP2"
_HELDOUT = 8
_LONGEST_RUN_S = 180.0


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        draft: name of its folder; a run goes on from what it finds there.
        until: step after which it stops dead, saved; None goes to the end.
        replays: whether one process on a GPU launches a step at once, as it does by itself; several never do.
    """

    name: str
    draft: str
    processes: int = 1
    parallel: str = "ddp"
    until: int | None = None
    replays: bool = True


def runs(sizes: Sizes, device: str) -> list[Run]:
    """In this order: what matters most comes first."""
    saved = sizes.saved_at
    listed = [
        Run(ONE, "one"),
        Run(DDP, "ddp", GPUS, "ddp", until=saved),
        Run(FSDP, "fsdp", GPUS, "fsdp", until=saved),
        Run(RESUMED, "ddp"),
    ]
    # On a CPU nothing is replayed.
    return [*listed, Run(KERNELS, "kernels", until=saved, replays=False)] if device == "cuda" else listed


def measure(settings: Settings, found: Found) -> None:
    """Dump states with transformers, then each run on them."""
    sizes, device = settings.sizes, settings.device
    draft_vocab_size = read_json(Path(settings.draft) / "config.json")["draft_vocab_size"]
    prepare_target(settings.params(settings.target).target, TARGET)
    _write_answers(sizes)
    for parallel in ("ddp", "fsdp"):
        training = {
            "draft_vocab_size": draft_vocab_size,
            "ttt_length": sizes.ttt_length,
            "learning_rate": 1e-3,
            "warmup_steps": sizes.discard,
            "max_steps": sizes.steps,
            "batch_tokens": sizes.batch_tokens,
            "global_batch_size": GPUS,
            "parallel": parallel,
            "checkpoint_every": sizes.saved_at,
            "evaluate_every": sizes.steps,
        }
        dumped = {"storage_dtype": sizes.dtype, "batch_tokens": 32_768}
        write_params(settings.params(settings.target, dump=dumped, train_draft=training), Path(f"{parallel}.yaml"))
    run(module_command("infra.gpu.two_gpus_train", "ddp.yaml", "--dump"), Path(), Path("dump.log"), found.seconds_left)
    for one in runs(sizes, device):
        found.attempt(one.name, lambda one=one: _train(one, sizes, found))


def _write_answers(sizes: Sizes) -> None:
    """Text of this checkout, so much that every step is full."""
    step = GPUS * (sizes.batch_tokens // sizes.sequence)
    sequences = list(islice(text_sequences(load_tokenizer(), sizes.sequence), sizes.sequences + _HELDOUT))
    heldout, train = sequences[:_HELDOUT], sequences[_HELDOUT:]
    splits = {"heldout": heldout, "train": train[: len(train) // step * step]}
    for split, of_split in splits.items():
        rows = (Response(f"{split}-{n}", "", [], ids[:1], ids[1:], "", "stop") for n, ids in enumerate(of_split))
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))


def _train(one: Run, sizes: Sizes, found: Found) -> dict[str, Any]:
    arguments = [f"{one.parallel}.yaml", "--draft", one.draft, "--name", one.name.replace(" ", "_")]
    arguments += ["--until", str(one.until)] if one.until else []
    arguments += [] if one.replays else ["--kernels"]
    command = module_command("infra.gpu.two_gpus_train", *arguments, processes=one.processes)
    log = Path(f"{arguments[4]}.log")
    run(command, Path(), log, min(found.seconds_left, _LONGEST_RUN_S * sizes.patience))
    notes = read_json(Path(f"{arguments[4]}.json"))
    return {"tokens_per_s": speed(notes["readings"], sizes), **notes}


def speed(readings: list[dict[str, Any]], sizes: Sizes) -> int | None:
    """Tokens/s over the steps between `discard` and where a run is saved, neither included in part; None without such."""
    counted = [reading for reading in readings if sizes.discard <= reading["step"] < sizes.saved_at]
    if len(counted) < 2:
        return None
    seconds = counted[-1]["seconds"] - counted[0]["seconds"]
    return round(sum(reading["tokens"] for reading in counted[1:]) / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("params", type=Path)
    parser.add_argument("--dump", action="store_true", help="the states; nothing is trained")
    parser.add_argument("--draft", help="name of the draft's folder")
    parser.add_argument("--name", help="of the run's notes")
    parser.add_argument("--until", type=int, help="step after which it stops dead")
    parser.add_argument("--kernels", action="store_true", help="launch kernels one by one")
    args = parser.parse_args()
    if args.dump:
        print(dump(load_params(args.params)))
    else:
        train(args)


def train(args: argparse.Namespace) -> None:
    """A run as the stage makes it, with the time of each reading; no draft is written at its end."""
    params = load_params(args.params)
    with Processes.joined(params) as processes:
        trainer, _ = prepare_training(params, ARTIFACTS / "drafts" / args.draft, processes=processes)
        if args.kernels:
            trainer.train_step = TrainStep(trainer.draft, trainer.head, params.train_draft.recompute_activations)
        began, from_step, readings = time.perf_counter(), trainer.step, []
        for step in trainer.steps():
            seconds = round(time.perf_counter() - began, 4)
            readings.append({"step": step.step, "loss": step.loss, "tokens": step.tokens, "seconds": seconds})
            if step.step == args.until:
                break
        peak = torch.cuda.max_memory_allocated() / 2**30 if params.target.device != "cpu" else None
        peaks = processes.gather(peak and round(peak, 2))
        if processes.is_first:
            notes = {
                "processes": processes.size,
                "from_step": from_step,
                "peak_gib_of_each": peaks,
                "readings": readings,
            }
            write_json(Path(f"{args.name}.json"), notes)


if __name__ == "__main__":
    main()
