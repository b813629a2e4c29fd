"""A real run that is signalled or killed: nothing that was trained is lost, and its end is that of a run left in peace."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import suppress

import psutil
import pytest
import torch

from tasks.common.target import load_model
from tasks.train_draft import trainer as trainer_module
from tasks.train_draft.interrupts import RETRY, Interrupts, retryable
from tasks.train_draft.prepare import prepare_training, write_result
from tests.flows.processes import until
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, SETTINGS, files, train

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def uninterrupted(params):
    """The files of a run that nothing disturbed, which are then removed."""
    load_model(params.target)  # imports, once for all children
    return whole(params)


def whole(params) -> dict[str, bytes]:
    finish(start(params))
    found = files()
    shutil.rmtree(DRAFT)
    return found


def start(params, session: bool = False):
    def run() -> None:
        if session:
            os.setsid()
        torch.set_num_threads(1)  # a parent's threads do not live on in what is forked
        train(params)

    process = FORK.Process(target=run)
    process.start()
    return process


def finish(process) -> None:
    process.join()
    assert process.exitcode == 0


def steps() -> list[int]:
    with suppress(FileNotFoundError):  # the run may be through at this moment
        return sorted(int(path.stem[5:]) for path in CHECKPOINTS.iterdir() if path.match("step-*.json"))
    return []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_the_step_and_says_try_again(params, tiny_params, number, capfd):
    rare = SETTINGS | {"max_steps": 300, "checkpoint_every": 1000, "evaluate_every": 1000}
    params = tiny_params(train_draft=rare)
    process = start(params)
    until((CHECKPOINTS / "heldout_argmax.npy").exists, every=0.01)
    time.sleep(0.3)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == RETRY == 75
    (saved,) = steps()
    assert 0 < saved < 300
    again = start(params)
    until(lambda: f"resuming after step {saved} of 300" in capfd.readouterr().out, every=0.01)
    os.kill(again.pid, number)
    again.join()


def test_a_run_that_was_stopped_again_and_again_ends_with_the_same_bytes(params, tiny_params):
    params = tiny_params(train_draft=SETTINGS | {"max_steps": 16})
    uninterrupted = whole(params)
    for times in range(1, 4):
        process, before = start(params), steps()
        until(lambda before=before: steps() != before, every=0.001)
        os.kill(process.pid, signal.SIGTERM)
        process.join()
        assert process.exitcode == RETRY, f"the {times}. time"
    finish(start(params))
    assert files() == uninterrupted


@pytest.mark.parametrize("stopped_in", [2, 3, 6, 7])
def test_the_curve_does_not_know_where_a_run_was_stopped(params, monkeypatch, stopped_in):
    """Where several steps are read at once, as on a GPU: three here, so that evaluations fall between readings."""
    monkeypatch.setitem(trainer_module._STEPS_A_READING, "cpu", 3)
    torch.set_num_threads(1)
    losses, report = in_one_go(params)
    assert [point["step"] for point in report["curve"]] == [4, 8]
    assert [point["loss"] for point in report["curve"]] == [losses[3], (losses[6] + losses[7]) / 2]

    process = FORK.Process(target=stop_in, args=(params, stopped_in))
    process.start()
    process.join()
    assert process.exitcode == RETRY
    assert max(steps()) == stopped_in
    assert train(params) == report


def in_one_go(params) -> tuple[list[float], dict]:
    """Loss of every step, and the report."""
    trainer, facts = prepare_training(params, DRAFT)
    losses, examine = [], trainer.health.examine

    def noted(vitals) -> None:
        losses.append(vitals.loss)
        examine(vitals)

    trainer.health.examine = noted
    for _ in trainer.steps():
        pass
    report = write_result(trainer, DRAFT, facts)
    trainer.checkpoints.remove()
    return losses, report


def stop_in(params, number: int) -> None:
    """Train, and send this process a signal while it computes that step."""
    trainer, _ = prepare_training(params, DRAFT)
    one_step = trainer._one_step

    def signalled(batches) -> None:
        if trainer.step == number - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        one_step(batches)

    trainer._one_step = signalled
    for _ in trainer.steps():
        pass


def test_what_is_drawn_after_a_resume_is_what_would_have_been_drawn(params):
    """Nothing in a step draws today: the state of the generator is kept for the day that something does."""
    torch.manual_seed(1)
    uninterrupted = draws(params)
    shutil.rmtree(DRAFT)
    torch.manual_seed(1)
    draws(params, until=5)
    torch.manual_seed(2)
    again = draws(params)
    assert again == {step: uninterrupted[step] for step in range(4, 9)}  # checkpoint and evaluation are those of step 4


def draws(params, until: int | None = None) -> dict[int, float]:
    """A random number after each step."""
    trainer, _ = prepare_training(params, DRAFT)
    drawn = {}
    for step in trainer.steps():
        drawn[step.step] = torch.rand(()).item()
        if step.step == until:
            break
    return drawn


def test_readers_outlive_a_signal_to_the_group_and_leave_with_the_trainer(params, tiny_params, uninterrupted):
    process = start(tiny_params(train_draft=SETTINGS | {"data_workers": 1}), session=True)
    until(steps, every=0.001)
    readers = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == RETRY
    assert readers
    until(lambda: not any(reader.is_running() for reader in readers), seconds=30)
    finish(start(params))
    assert files() == uninterrupted


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (SystemExit(143), RETRY),
        (SystemExit(129), RETRY),
        (KeyboardInterrupt(), RETRY),
        (SystemExit(RETRY), RETRY),
        (SystemExit(1), 1),
        (SystemExit(2), 2),
    ],
)
def test_a_signal_outside_the_steps_says_try_again_too(raised, code, capsys):
    with pytest.raises(SystemExit) as left, retryable():
        raise raised
    assert left.value.code == code
    assert ("the same command goes on from there" in capsys.readouterr().err) == (code == RETRY)


def test_a_run_that_a_missing_process_ends_is_not_cut_short_by_torchruns_signal():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.raises(RuntimeError), Interrupts() as interrupts:
            raise RuntimeError("gloo: Connection closed by peer")
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.faults
@pytest.mark.parametrize("data_workers", [0, 1])
def test_killed_at_twenty_random_moments_it_ends_with_the_same_bytes(params, tiny_params, data_workers):
    """R5: optimiser, schedule, order of the data and the best draft are those of a run left in peace."""
    load_model(params.target)
    often = SETTINGS | {"max_steps": 60, "checkpoint_every": 2, "evaluate_every": 6, "data_workers": data_workers}
    params = tiny_params(train_draft=often)
    began = time.monotonic()
    uninterrupted = whole(params)
    lasted = time.monotonic() - began
    moments, killed, at = random.Random(0), 0, []
    while killed < 20:
        process = start(params)
        time.sleep(moments.uniform(0, lasted / 3))
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was through already
            assert files() == uninterrupted
            shutil.rmtree(DRAFT)
        else:
            killed += 1
            at.append(max(steps(), default=0))
    finish(start(params))
    assert files() == uninterrupted
    assert len(set(at)) > 3, f"killed after the checkpoints {at}"
