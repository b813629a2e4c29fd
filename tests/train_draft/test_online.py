"""Training beside the dump: the states come and go, and the draft learns from every one of them."""

import multiprocessing
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.planned_shards import plan_shards
from tasks.common.responses import RESPONSES, Response
from tasks.common.ring import consume
from tasks.common.target import TargetShape, load_config, load_model, model_folder, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.dump_hidden_states.dump import dump
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import DraftData
from tasks.train_draft.online import RingSource
from tasks.train_draft.prepare import prepare_training, write_result
from tasks.train_draft.processes import Processes
from tasks.train_draft.target_head import TargetHead, cache_target_argmax
from tests.flows.processes import until
from tests.stored import close_again, copy_of, write_shard
from tests.train_draft.conftest import in_processes

DRAFT, TRAIN = ARTIFACTS / "draft", HIDDEN_STATES / "train"
SETTINGS = {
    "draft_vocab_size": 200,
    "max_steps": 8,
    "batch_tokens": 32,
    "warmup_steps": 2,
    "checkpoint_every": 4,
    "evaluate_every": 4,
}


@pytest.fixture
def make_params(project, tiny_params):
    """Settings with a ring of so many shards; None: all states stay."""
    torch.manual_seed(0)
    for split, count in (("train", 12), ("heldout", 3)):
        rows = [
            Response(
                f"{split}-{n}",
                "chat",
                [],
                torch.randint(3, 60, (5 + n,)).tolist(),
                torch.randint(3, 60, (9,)).tolist(),
                "",
                "stop",
            )
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    load_model(tiny_params().target)  # imports, once for the child

    def make(ahead_shards: int | None, **changed):
        dump_settings = {"shard_tokens": 40, "ahead_shards": ahead_shards}
        return tiny_params(dump=dump_settings, train_draft=SETTINGS | changed, gates={"replay_samples": 1})

    return make


@pytest.fixture
def dumping(make_params):
    """A dump in a process of its own, with room for two shards."""

    def run() -> None:
        torch.set_num_threads(1)
        dump(make_params(2))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    until((HIDDEN_STATES / "heldout" / "manifest.json").exists)
    yield process
    process.kill()
    process.join()


def test_a_draft_is_trained_while_its_states_come_and_go(make_params, dumping):
    params, largest, seen = make_params(2), 0, []
    trainer, facts = prepare_training(params, DRAFT, RingSource)
    read = trainer._one_step

    def one_step(batches):
        nonlocal largest
        largest = max(largest, len(list(TRAIN.glob("shard-*.safetensors"))))
        seen.extend(name for batch in batches for name in batch.samples.sample_ids)
        return read(batches)

    trainer._one_step = one_step
    assert [step.step for step in trainer.steps()] == list(range(1, 9))
    report = write_result(trainer, DRAFT, facts)
    assert seen == sorted(set(seen), key=seen.index)  # none of them twice
    assert len(seen) >= 8
    assert largest <= 2
    assert facts["train"]["samples"] == 12
    assert min(report["predicted_accept_lengths"]) >= 1
    assert (DRAFT / "draft.safetensors").exists()


def test_the_vocabulary_and_the_sizes_are_those_of_a_dump_that_stays(make_params):
    """The one counts in the answers, the other in the states."""
    dump(make_params(None))
    _, kept = prepare_training(make_params(None), DRAFT)
    whole = (DRAFT / "vocab_map.safetensors").read_bytes()
    dump(make_params(99))
    _, known = prepare_training(make_params(99), DRAFT, RingSource)
    assert known == kept
    assert (DRAFT / "vocab_map.safetensors").read_bytes() == whole


def test_an_epoch_of_the_ring_is_every_sample_once_with_the_targets_of_the_cache(make_params, tmp_path):
    params = make_params(99)
    dump(make_params(None))
    weights, shape = TargetWeights(model_folder(params.target)), TargetShape.of(load_config())
    head = TargetHead(weights, shape, True, "cpu")
    states = HiddenStates(TRAIN)
    form = BatchForm("cpu", torch.float32, 3, torch.arange(320), 64)
    data = DraftData(states, cache_target_argmax(states, head, tmp_path / "argmax.npy"), 64, form)
    cached = {name: data.read([index]) for index, name in enumerate(states.ids)}
    dump(params)  # online: nothing is left to compute
    source, seen = RingSource(params), []
    for batch in source.batches(head, tmp_path, form, Processes.alone(params)):
        for name, (start, end) in zip(batch.samples.sample_ids, batch.samples.bounds, strict=True):
            assert torch.equal(batch.target_argmax[start:end], cached[name].target_argmax)
            assert torch.equal(batch.samples.aux[start:end], cached[name].samples.aux)
            seen.append(name)
        if len(seen) == len(cached):
            break
    assert sorted(seen) == sorted(cached)
    freed = len(list(TRAIN.glob("shard-*.freed")))
    plans = len(list(plan_shards("train", params, target_contract(params.contract))))
    assert freed == plans - 1  # the last one is freed when the next is asked for


def test_a_second_epoch_waits_for_another_dump(make_params, capsys, tmp_path):
    params = make_params(99)
    dump(params)
    source = RingSource(params)
    head = TargetHead(TargetWeights(model_folder(params.target)), TargetShape.of(load_config()), True, "cpu")
    form = BatchForm("cpu", torch.float32, 3, torch.arange(320), 64)
    batches = iter(source.batches(head, tmp_path, form, Processes.alone(params)))
    seen: list[str] = []
    while len(seen) < 12:
        seen += next(batches).samples.sample_ids
    source._stream._check = lambda folder, plan: None
    # The dump that is started again once the epoch is over.
    real = source._stream._plans

    def dump_again():
        dump(params)
        return real()

    source._stream._plans = dump_again
    again = list(next(batches).samples.sample_ids)
    assert set(again) <= set(seen)
    assert source._stream.epoch == 1
    assert "waiting for epoch 1: start the dump again" in capsys.readouterr().out


def shards(suffix: str) -> list[str]:
    return sorted(path.stem for path in TRAIN.glob(f"shard-*.{suffix}"))


def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint_with_what_is_not_freed(make_params, dumping):
    params = make_params(2)

    def train_and_die() -> None:
        torch.set_num_threads(1)
        for step in prepare_training(params, DRAFT, RingSource)[0].steps():
            if step.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    killed = multiprocessing.get_context("fork").Process(target=train_and_die)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    freed = shards("freed")
    assert freed
    trainer, facts = prepare_training(params, DRAFT, RingSource)
    assert shards("freed") == freed
    # Step 4 was saved before its evaluation, which is made again.
    assert [step.step for step in trainer.steps()] == [4, 5, 6, 7, 8]
    assert shards("freed")[: len(freed)] == freed
    assert len(shards("freed")) > len(freed)
    assert [point["step"] for point in write_result(trainer, DRAFT, facts)["curve"]] == [4, 8]


def test_a_shard_whose_reader_died_while_it_freed_it_is_not_read_again(make_params):
    """It is marked first, then removed."""
    params = make_params(99)
    dump(params)
    (TRAIN / "shard-00000.json").rename(TRAIN / "shard-00000.freed")
    first, later = list(plan_shards("train", params, target_contract(params.contract)))[:2]
    plan, _ = next(consume(TRAIN, [first, later], lambda folder, plan: None))
    assert plan.name == "shard-00001"
    assert "shard-00000" not in shards("safetensors")


def test_a_trainer_that_died_at_the_end_of_an_epoch_goes_on_in_the_next(make_params):
    """All is freed and not yet forgotten; the checkpoint is of the epoch that is over."""
    params = make_params(99)
    dump(params)
    for step in prepare_training(params, DRAFT, RingSource)[0].steps():
        if step.step == 4:
            break
    for name in shards("safetensors"):
        (TRAIN / f"{name}.json").rename(TRAIN / f"{name}.freed")
        (TRAIN / f"{name}.safetensors").unlink()

    def dump_once_forgotten():
        if not shards("freed"):
            dump(params)
        return plan_shards("train", params, source.contract)

    source = RingSource(params)
    source._stream._plans = dump_once_forgotten
    trainer, _ = prepare_training(params, DRAFT, lambda params: source)
    assert trainer.step == 4
    assert trainer.batches.epoch == 1


def test_training_on_states_that_come_and_go_needs_the_other_command(make_params):
    with pytest.raises(DraftlineError, match=r"python -m tasks\.train_draft\.online"):
        prepare_training(make_params(2), DRAFT)


def ids_of_one_process(params) -> tuple[list[str], dict]:
    """Samples of the steps that one of two processes computes, with the report."""
    with Processes.joined(params) as processes:
        trainer, facts = prepare_training(params, DRAFT, RingSource, processes)
        seen, one_step = [], trainer._one_step

        def noted(batches):
            seen.extend(name for batch in batches for name in batch.samples.sample_ids)
            one_step(batches)

        trainer._one_step = noted
        for _ in trainer.steps():
            pass
        return seen, write_result(trainer, DRAFT, facts) if processes.is_first else {}


def test_two_processes_share_a_ring(make_params, dumping):
    params = make_params(2, global_batch_size=2, max_steps=4)
    (first, report), (second, _) = in_processes(2, ids_of_one_process, params)
    assert not set(first) & set(second)
    assert len(set(first + second)) == len(first + second) >= 8
    assert report["curve"][-1]["step"] == 4


def test_an_epoch_without_a_supervised_position_is_an_error(make_params, tmp_path):
    params = make_params(99)
    dump(params)
    source = RingSource(params)

    def unsupervised():
        for plan in plan_shards("train", params, source.contract):
            yield replace(plan, loss_mask=np.zeros_like(plan.loss_mask))

    source._stream._plans, source._stream._check = unsupervised, lambda folder, plan: None
    head = TargetHead(TargetWeights(model_folder(params.target)), TargetShape.of(load_config()), True, "cpu")
    form = BatchForm("cpu", torch.float32, 3, torch.arange(320), 64)
    with pytest.raises(DraftlineError, match=r"a whole epoch without a batch: no sample \(train-0, train-1, train-2"):
        next(iter(source.batches(head, tmp_path, form, Processes.alone(params))))


def test_held_out_states_that_are_not_there_yet_are_waited_for_not_trained_without(make_params):
    with pytest.raises(
        DraftlineError, match=r"heldout: .* not there yet. Start the dump, `python -m tasks.dump_hidden"
    ):
        RingSource(make_params(2))


def test_held_out_states_of_other_answers_are_not_trained_against(make_params):
    dump(make_params(99))
    answers = RESPONSES / "heldout.jsonl"
    in_order = answers.read_text().splitlines(keepends=True)
    for changed in (in_order[::-1], []):  # another shard; none, where the dump has one
        answers.write_text("".join(changed))
        with pytest.raises(DraftlineError, match=r"of these answers and this params.yaml are not there yet"):
            RingSource(make_params(99))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda aux: aux * float("nan"), "Every state is finite"),
        (lambda aux: aux.flip(1), "it is the output of layer 4"),
    ],
)
def test_held_out_states_pass_the_gate_before_anything_is_trained(make_params, spoil, found):
    dump(make_params(99))
    states = HiddenStates(HIDDEN_STATES / "heldout")
    samples = [copy_of(states.read(index)) for index in range(len(states))]
    plans = list(plan_shards("heldout", make_params(99), states.contract))
    samples[-1] = replace(samples[-1], aux=spoil(samples[-1].aux))
    write_shard(states.folder, plans[-1].name, [s for s in samples if s.id in plans[-1].ids], plans[-1].sha256)
    close_again(states)
    with pytest.raises(DraftlineError, match=rf"(?s)heldout/{plans[-1].name}: .*{found}"):
        RingSource(make_params(99))


@pytest.mark.parametrize("ahead_shards", [None, 2])
def test_states_that_stay_are_not_freed(make_params, ahead_shards):
    dump(make_params(None))
    held = sorted(path.name for path in TRAIN.iterdir())
    with pytest.raises(DraftlineError, match="this would free each of its shards"):
        RingSource(make_params(ahead_shards))
    assert sorted(path.name for path in TRAIN.iterdir()) == held
