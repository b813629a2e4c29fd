"""A small dump to train on, and runs of it: whole, cut short, and over several processes as torchrun starts them."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.files import ARTIFACTS, write_jsonl
from tasks.common.params import Params
from tasks.common.responses import RESPONSES, Response
from tasks.dump_hidden_states.dump import dump
from tasks.train_draft.prepare import prepare_training, write_result
from tasks.train_draft.processes import Processes

DRAFT = ARTIFACTS / "draft"
CHECKPOINTS = DRAFT / "checkpoints"
SETTINGS = {
    "draft_vocab_size": 200,
    "max_steps": 8,
    "batch_tokens": 64,
    "warmup_steps": 2,
    "checkpoint_every": 2,
    "evaluate_every": 4,
}


@pytest.fixture
def params(project, tiny_params) -> Params:
    torch.manual_seed(0)
    for split, count in (("train", 9), ("heldout", 3)):
        rows = [
            Response(
                f"{split}-{n}",
                "chat",
                [],
                torch.randint(3, 60, (5 + n,)).tolist(),
                torch.randint(3, 60, (9,)).tolist(),
                "x",
                "length",
            )
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    params = tiny_params(train_draft=SETTINGS)
    dump(params)
    return params


def train(params: Params, until: int | None = None) -> dict | None:
    """Train to the end, or stop dead after step `until`."""
    with Processes.joined(params) as processes:
        trainer, facts = prepare_training(params, DRAFT, processes=processes)
        for step in trainer.steps():
            if step.step == until:
                return None
        if not processes.is_first:
            return None
        report = write_result(trainer, DRAFT, facts)
        trainer.checkpoints.remove()
        return report


def in_processes(number: int, function: Callable, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of so many processes that torchrun starts here, forked from this one.

    Raises:
        ChildFailedError: one of them failed.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        max_restarts=0,
        run_id=str(os.getpid()),
        start_method="fork",
        rdzv_backend="c10d",
        # In numbers: a name is looked up under a lock of the C library, and a fork keeps it locked for ever where a thread of
        # this process holds it at that moment (seen once: Prefect's).
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        monitor_interval=0.05,
    )
    returned = elastic_launch(config, _one_thread)(function, arguments)
    return [returned[rank] for rank in range(number)]


def _one_thread(function: Callable, arguments: tuple) -> Any:
    # A parent's threads do not live on in what is forked: neither those that compute nor those that its garbage would join.
    gc.freeze()
    torch.set_num_threads(1)
    return function(*arguments)


def files(folder: Path = DRAFT) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
