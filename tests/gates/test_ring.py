"""A dump and a reader at once: the ring stays small, every shard passes the gate before it is read, either may die."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.planned_shards import plan_shards
from tasks.common.responses import RESPONSES, Response
from tasks.common.ring import consume, is_freed
from tasks.common.target import load_model, model_folder, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.dump_hidden_states.dump import dump
from tasks.gates.shard import require_sound

FORK = multiprocessing.get_context("fork")
TRAIN = HIDDEN_STATES / "train"
AHEAD = 3


@pytest.fixture
def params(project, tiny_params):
    torch.manual_seed(0)
    for split, count in (("train", 16), ("heldout", 2)):
        rows = [
            Response(f"{split}-{n}", "chat", [], torch.randint(3, 320, (25 + n,)).tolist(), [7, 8, 9], "x", "length")
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    load_model(tiny_params().target)  # imports, once for all children
    return tiny_params(dump={"shard_tokens": 50, "ahead_shards": AHEAD})


@pytest.fixture
def start(params):
    """Start a dump in a process of its own; what still runs at the end is killed."""
    started = []

    def begin():
        def run() -> None:
            torch.set_num_threads(1)
            dump(params)

        started.append(FORK.Process(target=run))
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def read(params):
    """Consume the ring; `each(shard)` is called on every shard."""
    contract = target_contract(params.contract)
    norm = TargetWeights(model_folder(params.target)).final_norm()

    def run(each=lambda shard: None, limit: int | None = None) -> list[str]:
        check = lambda folder, plan: require_sound(folder, plan, params, contract, norm)  # noqa: E731
        ids: list[str] = []
        shards = consume(TRAIN, plan_shards("train", params, contract), check, patience_s=60)
        for number, (plan, stored) in enumerate(shards, 1):
            assert len(stored.last) == plan.tokens
            ids += plan.ids
            each(plan)
            if number == limit:
                break
        return ids

    return run


def shards_there() -> int:
    return len({path.name for path in Path(TRAIN).glob("shard-*.safetensors")})


def test_every_sample_passes_once_and_the_ring_stays_small(start, read):
    largest = 0

    def look(_plan) -> None:
        nonlocal largest
        time.sleep(0.05)  # the dump is faster than its reader
        largest = max(largest, shards_there())

    process = start()
    assert read(look) == [f"train-{n}" for n in range(16)]
    process.join()
    assert process.exitcode == 0
    assert 1 < largest <= AHEAD
    assert shards_there() == 0


def test_the_dump_waits_for_its_reader(start, read):
    process = start()
    while len(list(TRAIN.glob("shard-*.json"))) < AHEAD:
        pass
    time.sleep(0.3)
    assert shards_there() == AHEAD
    assert process.is_alive()


def test_a_dump_that_died_goes_on_behind_what_was_consumed(start, read):
    first = start()
    ids = read(limit=2)
    first.kill()
    first.join()
    start()
    # The shard at which the first reader stopped was not freed: it is read again.
    assert ids + read() == [*ids, *(f"train-{n}" for n in range(len(ids) // 2, 16))]


def test_a_shard_that_fails_the_gate_is_never_read(start, read, params):
    start()
    while not (TRAIN / "shard-00000.json").exists():
        pass
    path = TRAIN / "shard-00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(-200, os.SEEK_END)
        byte = file.read(1)
        file.seek(-200, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DraftlineError, match=r"shard-00000: .*expectations failed; it is not read(.|\n)*train-1"):
        read()
    plan = next(plan_shards("train", params, target_contract(params.contract)))
    assert not is_freed(TRAIN, plan.name, plan.sha256)


def test_a_reader_says_so_when_nothing_comes(params):
    shards = plan_shards("train", params, target_contract(params.contract))
    with pytest.raises(DraftlineError, match=r"not written within 0 s\. Does the dump still run"):
        next(consume(TRAIN, shards, lambda folder, plan: None, patience_s=0))
