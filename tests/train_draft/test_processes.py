"""Several processes train as one does: real ones, as torchrun starts them, which talk through gloo."""

import os
import signal
import sys
from itertools import count

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample
from tasks.train_draft import trainer as trainer_module
from tasks.train_draft.interrupts import RETRY
from tasks.train_draft.prepare import prepare_training
from tasks.train_draft.processes import Processes
from tasks.train_draft.state import gathered
from tests.stored import copy_of, write_split
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, SETTINGS, files, in_processes, train

PARALLEL = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])


@pytest.fixture
def make_params(params, tiny_params):
    """Settings of a run of which a step takes four batches."""

    def make(**changed):
        return tiny_params(train_draft=SETTINGS | {"global_batch_size": 4, "batch_tokens": 32} | changed)

    torch.set_num_threads(1)
    return make


def first_gradients(params) -> tuple[dict[str, np.ndarray], list[tuple[str, ...]]]:
    """Of one step, before they are clipped, with the samples of each batch of this process."""
    with Processes.joined(params) as processes:
        trainer, _ = prepare_training(params, DRAFT, processes=processes)
        batches = [batch for batch, _ in zip(trainer.batches, range(4 // processes.size), strict=False)]
        trainer._one_step(batches)
        gradients = {name: parameter.grad for name, parameter in trainer.draft.named_parameters()}
        names = [batch.samples.sample_ids for batch in batches]
        return {name: tensor.numpy() for name, tensor in gathered(gradients).items()}, names


@PARALLEL
def test_gradients_are_those_of_one_process_on_the_joint_batch(make_params, parallel):
    params = make_params(max_grad_norm=1e9, parallel=parallel)
    alone, samples = first_gradients(params)
    (found, first), (same, second) = in_processes(2, first_gradients, params)
    assert not set(sum(first, ())) & set(sum(second, ()))
    assert [*first, *second] == [samples[0], samples[2], samples[1], samples[3]]
    assert alone.keys() == found.keys()
    for name, gradient in alone.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name] / scale, gradient / scale, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found[name], same[name])


@PARALLEL
def test_a_run_over_two_processes_ends_like_one_of_one_process(make_params, parallel):
    params = make_params(parallel=parallel)
    report = train(params)
    alone = load_file(DRAFT / "draft.safetensors")
    found, _ = in_processes(2, train, params)
    assert_same_run(report, found)
    assert_close(load_file(DRAFT / "draft.safetensors"), alone)
    assert not CHECKPOINTS.exists()


def assert_same_run(one: dict, other: dict) -> None:
    assert one["data"] == other["data"]
    for ours, theirs in zip(one["curve"], other["curve"], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["heldout"]["loss"] == pytest.approx(theirs["heldout"]["loss"], rel=1e-4)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    # Adam divides by the size of the gradient: where that is rounding alone, so is the direction of the step.
    for name, tensor in one.items():
        assert (tensor - other[name]).norm() < 1e-3 * other[name].norm(), name


@pytest.mark.parametrize(
    ("before", "after"), [((2, "ddp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (4, "ddp"))]
)
def test_a_run_goes_on_over_another_number_of_processes(make_params, before, after, capfd):
    whole = train(make_params())
    weights = load_file(DRAFT / "draft.safetensors")
    for number, parallel, until in ((*before, 5), (*after, None)):
        params = make_params(parallel=parallel)
        report = in_processes(number, train, params, until)[0] if number > 1 else train(params, until)
    assert "resuming after step 4 of 8" in capfd.readouterr().out
    assert_same_run(whole, report)
    assert_close(load_file(DRAFT / "draft.safetensors"), weights)


@PARALLEL
def test_a_killed_run_over_two_processes_resumes_to_the_same_bytes(make_params, parallel):
    params = make_params(parallel=parallel)
    in_processes(2, train, params)
    whole = files()
    for path in DRAFT.iterdir():
        path.unlink()
    in_processes(2, train, params, 5)
    in_processes(2, train, params)
    assert files() == whole


def test_processes_that_cannot_share_a_step_evenly_are_refused(make_params, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(
        DraftlineError, match=r"global_batch_size is 4, which 8 processes cannot share .* multiple of 8"
    ):
        train(make_params())


def signalled(params, number: int, rank: int, after: int) -> None:
    """Train, and send this process a signal after a step if it is that one of the ranks."""
    with Processes.joined(params) as processes:
        trainer, _ = prepare_training(params, DRAFT, processes=processes)
        for step in trainer.steps():
            if processes.rank == rank and step.step == after:
                os.kill(os.getpid(), number)


@PARALLEL
def test_a_signal_to_one_process_ends_all_after_the_same_step_which_is_saved(make_params, parallel, capfd):
    params = make_params(parallel=parallel)
    in_processes(2, train, params)
    whole = files()
    for path in DRAFT.iterdir():
        path.unlink()
    with pytest.raises(ChildFailedError) as failed:
        in_processes(2, signalled, params, signal.SIGTERM, 1, 5)
    assert_all_left_with_the_retry_code(failed, capfd.readouterr())
    assert (CHECKPOINTS / "step-00000006.pt").exists()
    in_processes(2, train, params)
    assert "resuming after step 6 of 8" in capfd.readouterr().out
    assert files() == whole


def signalled_in(params, method: str, number: int) -> None:
    """Train, and send the second process a signal while its trainer is in that `method` for the `number`th time."""
    with Processes.joined(params) as processes:
        trainer, _ = prepare_training(params, DRAFT, processes=processes)
        called, inner = count(1), getattr(trainer, method)

        def outer(*arguments):
            if next(called) == number and processes.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return inner(*arguments)

        setattr(trainer, method, outer)
        for _ in trainer.steps():
            pass


def assert_all_left_with_the_retry_code(failed, said) -> None:
    assert {failure.exitcode for failure in failed.value.failures.values()} <= {RETRY, -signal.SIGTERM}
    assert failed.value.get_first_failure()[1].exitcode == RETRY
    assert "another process ended" not in said.err


@PARALLEL
def test_a_signal_while_held_out_answers_are_measured_ends_all_after_the_next_step(make_params, parallel, capfd):
    params = make_params(parallel=parallel)
    in_processes(2, train, params)
    whole = files()
    for path in DRAFT.iterdir():
        path.unlink()
    with pytest.raises(ChildFailedError) as failed:
        in_processes(2, signalled_in, params, "_measure", 1)
    assert_all_left_with_the_retry_code(failed, capfd.readouterr())
    assert (CHECKPOINTS / "step-00000005.pt").exists()
    in_processes(2, train, params)
    assert "resuming after step 5 of 8" in capfd.readouterr().out
    assert files() == whole


def test_several_processes_need_no_reading_to_agree_on_a_signal(make_params, monkeypatch, capfd):
    monkeypatch.setitem(trainer_module._STEPS_A_READING, "cpu", 1000)  # torchrun does not wait for that
    params = make_params(checkpoint_every=1000, evaluate_every=1000)
    with pytest.raises(ChildFailedError) as failed:
        in_processes(2, signalled_in, params, "_one_step", 3)
    assert_all_left_with_the_retry_code(failed, capfd.readouterr())
    assert [path.name for path in CHECKPOINTS.glob("step-*.pt")] == ["step-00000004.pt"]


def test_a_step_may_take_more_batches_than_an_epoch_has(make_params):
    """R6: nothing is dropped, a step goes on into the next epoch."""
    params = make_params(global_batch_size=16, max_steps=2, evaluate_every=2)
    seen, alone = trained_samples(params)
    assert len(seen) > 2 * 9
    assert set(seen) == {f"train-{number}" for number in range(9)}
    assert alone["epoch"] >= 2
    (first, position), (second, same) = in_processes(2, trained_samples, params)
    assert sorted(first + second) == sorted(seen)
    assert position == same == alone


def trained_samples(params) -> tuple[list[str], dict]:
    """Of this process, in all steps; and the position in the data behind the last."""
    with Processes.joined(params) as processes:
        trainer, _ = prepare_training(params, DRAFT, processes=processes)
        names, one_step = [], trainer._one_step

        def noted(batches) -> None:
            names.extend(name for batch in batches for name in batch.samples.sample_ids)
            one_step(batches)

        trainer._one_step = noted
        for _ in trainer.steps():
            pass
        processes.wait()
        if processes.is_first:
            trainer.checkpoints.remove()
        return names, trainer._position


@PARALLEL
def test_a_process_that_dies_ends_the_others_with_a_sentence(make_params, parallel, capfd):
    with pytest.raises(ChildFailedError) as failed:
        in_processes(2, signalled, make_params(parallel=parallel), signal.SIGKILL, 1, 3)
    rank, failure = failed.value.get_first_failure()
    assert (rank, failure.exitcode) == (1, -signal.SIGKILL)
    assert "process 0 of 2: another process ended in mid-step" in capfd.readouterr().err
    assert (CHECKPOINTS / "step-00000002.pt").exists()


def spoken(function, *arguments) -> None:
    """As a stage ends: by a sentence and exit code 1."""
    try:
        function(*arguments)
    except DraftlineError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def test_states_that_are_not_finite_are_named_whoever_read_them(make_params, capfd):
    params = make_params(init_from_target=False)
    states = HiddenStates(HIDDEN_STATES / "train")
    samples = [copy_of(states.read(i)) for i in range(len(states))]
    poisoned = samples[4]
    samples[4] = Sample(poisoned.id, poisoned.input_ids, poisoned.loss_mask, poisoned.aux * float("nan"), poisoned.last)
    for path in states.folder.iterdir():
        path.unlink()
    write_split(states.folder, states.contract, [samples])
    with pytest.raises(ChildFailedError):
        in_processes(2, spoken, train, params)
    said = [line for line in capfd.readouterr().err.splitlines() if "the loss is nan on samples" in line]
    assert len(said) == 1  # the first process speaks for all
    assert "train-4" in said[0]
