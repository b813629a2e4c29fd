"""A dump in processes of its own: killed at any moment, shared among ranks, and always the same bytes at the end."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.responses import RESPONSES, Response
from tasks.common.target import load_model
from tasks.dump_hidden_states.dump import dump
from tests.flows.processes import until

# Children start from what is loaded here; a parent's threads do not live on in them, so they compute with one.
FORK = multiprocessing.get_context("fork")
RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture
def params(project, tiny_params):
    torch.manual_seed(0)
    for split, count in (("train", 36), ("heldout", 5)):
        rows = [
            Response(f"{split}-{n}", "chat", [], torch.randint(3, 320, (5 + n,)).tolist(), [7, 8, 9], "x", "length")
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    load_model(tiny_params().target)  # imports, once for all children
    return tiny_params(dump={"batch_tokens": 64, "shard_tokens": 30})


def start(params, rank: int = 0, ranks: int = 1):
    def run() -> None:
        torch.set_num_threads(1)
        os.environ |= dict(zip(RANKED, (str(rank), str(ranks), "0"), strict=True))
        dump(params)

    process = FORK.Process(target=run)
    process.start()
    return process


def finish(process) -> None:
    process.join()
    assert process.exitcode == 0


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(HIDDEN_STATES.rglob("*")) if path.is_file()}


def shards() -> set[str]:
    return {path.stem for path in (HIDDEN_STATES / "train").glob("shard-*.json")}


@pytest.fixture
def uninterrupted(params) -> dict[Path, bytes]:
    """The files of a dump that nothing disturbed, which is then removed."""
    finish(start(params))
    whole = files()
    assert len(shards()) > 12
    shutil.rmtree(HIDDEN_STATES)
    return whole


@pytest.mark.faults
def test_killed_at_twenty_random_moments_it_ends_with_the_same_bytes(params, uninterrupted):
    began = time.monotonic()
    finish(start(params))
    lasted = time.monotonic() - began
    shutil.rmtree(HIDDEN_STATES)
    moments = random.Random(0)
    killed = 0
    while killed < 20:
        process = start(params)
        time.sleep(moments.uniform(0, lasted))
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was through already
            shutil.rmtree(HIDDEN_STATES)
        else:
            killed += 1
    finish(start(params))
    assert files() == uninterrupted


def test_a_shard_that_was_being_written_is_written_again(params, uninterrupted):
    process = start(params)
    partial = HIDDEN_STATES / "train" / ".shard-00003.safetensors.partial"
    until(lambda: partial.exists() or "shard-00003" in shards() or not process.is_alive(), every=0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (HIDDEN_STATES / "train" / "manifest.json").exists()
    finish(start(params))
    assert files() == uninterrupted


def test_ranks_write_disjoint_shards_and_the_last_one_closes(params, uninterrupted):
    finish(start(params, rank=1, ranks=3))
    first = shards()
    finish(start(params, rank=0, ranks=3))
    second = shards() - first
    assert {int(name.removeprefix("shard-")) % 3 for name in first} == {1}
    assert {int(name.removeprefix("shard-")) % 3 for name in second} == {0}
    assert not (HIDDEN_STATES / "train" / "manifest.json").exists()
    finish(start(params, rank=2, ranks=3))
    assert files() == uninterrupted


def test_ranks_that_run_at_once_close_the_split_once_and_whole(params, uninterrupted):
    running = [start(params, rank, 3) for rank in range(3)]
    for process in running:
        finish(process)
    assert files() == uninterrupted
    assert len(HiddenStates(HIDDEN_STATES / "train")) == 36


def test_a_rank_that_died_is_run_again_alone(params, uninterrupted):
    running = [start(params, rank, 2) for rank in range(2)]
    until(lambda: len(shards()) >= 3, every=0.0005)
    running[1].kill()
    running[1].join()
    assert running[1].exitcode == -signal.SIGKILL  # it was not through yet
    finish(running[0])
    finish(start(params, rank=1, ranks=2))
    assert files() == uninterrupted


def test_another_number_of_ranks_takes_over_what_is_there(params, uninterrupted):
    finish(start(params, rank=1, ranks=2))
    before = {path: path.stat().st_mtime_ns for path in (HIDDEN_STATES / "train").glob("shard-*")}
    finish(start(params))
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert files() == uninterrupted
