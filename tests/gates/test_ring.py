"""A dump and a reader at once: the ring stays small, every shard passes the gate before it is read, either may die."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample
from tasks.common.planned_shards import plan_shards
from tasks.common.responses import RESPONSES, Response
from tasks.common.ring import consume, is_freed
from tasks.common.shard import StoredShard
from tasks.common.target import load_model, model_folder, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.dump_hidden_states.dump import dump
from tasks.gates.shard import ShardGate
from tests.flows.processes import until
from tests.stored import write_shard

FORK = multiprocessing.get_context("fork")
TRAIN, HELDOUT = HIDDEN_STATES / "train", HIDDEN_STATES / "heldout"
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


def gate_of(params) -> ShardGate:
    """Once the held-out states are there, which come first."""
    until((HELDOUT / "manifest.json").exists)
    norm = TargetWeights(model_folder(params.target)).final_norm()
    return ShardGate(params, target_contract(params.contract), norm, HiddenStates(HELDOUT))


@pytest.fixture
def read(params):
    """Consume the ring; `each(shard)` is called on every shard."""

    def run(each=lambda shard: None, limit: int | None = None) -> list[str]:
        ids: list[str] = []
        plans = plan_shards("train", params, target_contract(params.contract))
        shards = consume(TRAIN, plans, gate_of(params), patience_s=60)
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
    until(lambda: len(list(TRAIN.glob("shard-*.json"))) == AHEAD)
    process.join(2)  # it would be through by far
    assert process.is_alive()
    assert shards_there() == AHEAD


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
    until((TRAIN / "shard-00000.json").exists)
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


@pytest.fixture
def first(params):
    """The plan of the first shard of a dump that has ended, and its samples."""
    dump(params.model_copy(update={"dump": params.dump.model_copy(update={"ahead_shards": 99})}))
    plan = next(plan_shards("train", params, target_contract(params.contract)))
    shard = StoredShard(TRAIN / "shard-00000.safetensors")
    bounds = list(zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True))
    tensors = (shard.input_ids, shard.loss_mask, shard.aux, shard.last)
    return plan, [
        Sample(name, *(tensor[start:end].clone() for tensor in tensors))
        for name, (start, end) in zip(plan.ids, bounds, strict=True)
    ]


def judged(params, plan, samples: list[Sample]) -> str:
    """What the gate says of a shard that holds these samples in their place; empty: nothing."""
    write_shard(TRAIN, plan.name, samples, plan.sha256)
    try:
        gate_of(params)(TRAIN, plan)
    except DraftlineError as error:
        return str(error)
    return ""


def test_a_sound_shard_passes(params, first):
    assert judged(params, *first) == ""


def test_one_sample_with_few_tokens_of_the_assistant_is_no_fault_of_a_shard(params, first):
    plan, samples = first
    densities = [float(sample.loss_mask.float().mean()) for sample in samples]
    assert len(set(densities)) > 1
    strict = params.model_copy(
        update={"gates": params.gates.model_copy(update={"min_mask_density": sum(densities) / len(densities)})}
    )
    assert judged(strict, plan, samples) == ""


def test_many_samples_with_few_tokens_of_the_assistant_are(params, first, monkeypatch):
    monkeypatch.setattr("tasks.gates.shard._SAMPLES_FOR_A_SHARE", 2)
    strict = params.model_copy(update={"gates": params.gates.model_copy(update={"min_mask_density": 0.9})})
    assert "have less than gates.min_mask_density 0.9 of their tokens" in judged(strict, *first)


def test_a_shard_whose_slot_is_too_small_throughout_is_held_against_the_held_out_states(params, first):
    plan, samples = first
    for sample in samples:
        sample.aux[:, 1] *= 1e-3
    assert "The norm of slot 1 (layer 3) is like that of the other samples" in judged(params, plan, samples)


def test_a_shard_wholly_of_another_layer_is_found_by_replay(params, first):
    plan, samples = first
    for sample in samples:
        sample.aux[:, 1] = sample.aux[:, 2]
    assert "the contract says the output of layer 3; it is the output of layer 4" in judged(params, plan, samples)
