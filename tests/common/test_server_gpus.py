"""GPUs that are shown, refused and proven idle; a list of numbers stands in the place of the driver."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.server_gpus import ServerGpus
from tasks.common.server_plan import ServerPlan, flag

PLAN = ServerPlan("baseline", 31203, 30, "cuda", "float32", Path("target"), None, None, flags=(), environment=())


@pytest.fixture
def driver(monkeypatch):
    """`driver(0, 9000, named={1: {812: 9000}})`: what it says of the GPUs, and of who holds their memory."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tasks.common.server_gpus._RELEASE_S", 0)

    def say(*mib: int, named: dict[int, dict[int, int]] | None = None) -> None:
        monkeypatch.setattr("tasks.common.gpu.memory_used_mib", lambda: dict(enumerate(mib)))
        monkeypatch.setattr("tasks.common.gpu.holders", lambda: named or {})

    return say


@pytest.fixture
def gpus_of():
    """`gpus_of(first, span)`: the GPUs of a server that starts there; none runs when the test ends."""
    made = []

    def make(first: int = 0, span: int = 1, **changed) -> ServerGpus:
        flags = (flag("--base-gpu-id", str(first), reason=""), flag("--tp", str(span), reason=""))
        made.append(ServerGpus(replace(PLAN, flags=flags, **changed)))
        return made[-1]

    yield make
    for gpus in made:
        gpus.ended()


def test_memory_in_use_is_shown_with_the_servers_own_gpus_marked(driver, gpus_of, capsys):
    driver(4, 9000, 4, 0)
    gpus_of(2, 2).require_idle()
    assert capsys.readouterr().err == "GPU memory in use: 4, 9000, [4], [0] MiB ([] those of the baseline server)\n"
    driver(4, 0)
    gpus_of(0, 2).require_idle()
    assert capsys.readouterr().err == "GPU memory in use: 4, 0 MiB\n"


def test_a_gpu_that_others_hold_is_refused_with_who_they_are(driver, gpus_of):
    driver(4, 9000, named={1: {os.getppid(): 8996}})
    with pytest.raises(DraftlineError, match=rf"GPU 1 is not idle: 9000 MiB .*pid {os.getppid()} .*8996 MiB on GPU 1"):
        gpus_of(1).require_idle()
    gpus_of(0).require_idle()


def test_a_gpu_whose_holders_a_container_hides_is_refused(driver, gpus_of):
    driver(9000)
    with pytest.raises(DraftlineError, match="the driver names: none"):
        gpus_of().require_idle()


def test_another_server_of_this_process_may_hold_the_gpu_while_it_runs(driver, gpus_of):
    driver(4)
    first, second = gpus_of(), gpus_of()
    first.require_idle()
    first.started()
    driver(9000)
    second.require_idle()
    first.ended()
    with pytest.raises(DraftlineError, match="GPU 0 is not idle"):
        second.require_idle()


def test_what_this_process_holds_itself_is_no_reason_to_refuse(driver, gpus_of):
    driver(9000, named={0: {os.getpid(): 8900}})
    gpus_of().require_idle()
    driver(9000, named={0: {os.getpid(): 600}})
    with pytest.raises(DraftlineError, match="8400 MiB in use by others"):
        gpus_of().require_idle()


def test_what_this_process_holds_unseen_by_the_driver_is_not_taken_for_anothers(driver, gpus_of, monkeypatch):
    """launch_server runs the target on the GPU before the server starts, and its CUDA context stays."""
    driver(700)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    gpus_of().require_idle()


def test_the_server_of_a_dump_may_start_beside_a_trainer(driver, gpus_of):
    driver(9000)
    gpus_of(kind="states").require_idle()


def test_a_server_on_the_cpu_looks_at_no_gpu(driver, gpus_of, capsys):
    driver(9000)
    gpus_of(device="cpu").require_idle()
    assert capsys.readouterr().err == ""


def test_memory_that_does_not_come_back_is_an_error(driver, gpus_of, capsys):
    gpus = gpus_of(0, 2)
    driver(4, 4)
    gpus.require_idle()
    driver(9000, 9000)
    gpus.ready()
    driver(4, 9000)
    capsys.readouterr()
    with pytest.raises(DraftlineError, match=r"did not come back .*\{1: 9000\}, before \{0: 4, 1: 4\}"):
        gpus.prove_given_back()
    assert capsys.readouterr().err == "GPU memory in use: 4, 9000 MiB\n"


def test_a_driver_that_fails_when_a_server_has_ended_costs_no_measurement(driver, gpus_of, monkeypatch, capsys):
    def fail() -> dict[int, int]:
        raise DraftlineError("nvidia-smi: no answer")

    gpus = gpus_of()
    driver(4)
    gpus.require_idle()
    driver(9000)
    gpus.ready()
    monkeypatch.setattr("tasks.common.gpu.memory_used_mib", fail)
    gpus.prove_given_back()
    assert (
        "the GPU memory of the baseline server came back is not known: nvidia-smi: no answer" in capsys.readouterr().err
    )
    with pytest.raises(DraftlineError):
        gpus.require_idle()


def test_memory_of_a_neighbours_gpu_is_not_this_servers(driver, gpus_of):
    """Servers of several ranks start side by side on one host: all GPUs fill up at once."""
    gpus = gpus_of(2, 2)
    driver(*[4] * 8)
    gpus.require_idle()
    driver(*[9000] * 8)
    gpus.ready()
    assert gpus.held == [2, 3]


@pytest.mark.parametrize("first_out", [0, 1])
def test_of_two_servers_on_a_gpu_either_may_end_first(driver, gpus_of, first_out):
    pair = (gpus_of(), gpus_of())
    for gpus, (before, after) in zip(pair, ((4, 5000), (5000, 9000)), strict=True):
        driver(before)
        gpus.require_idle()
        gpus.started()
        driver(after)
        gpus.ready()
    driver(4000 if first_out == 0 else 5000)
    pair[first_out].ended()
    pair[first_out].prove_given_back()
    driver(4)
    pair[1 - first_out].ended()
    pair[1 - first_out].prove_given_back()


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("both_ready", [True, False])
def test_of_two_servers_that_started_at_once_either_may_end_first(driver, gpus_of, first_out, both_ready):
    driver(4)
    pair = gpus_of(), gpus_of()
    for one in pair:
        one.require_idle()
        one.started()
    driver(9000)
    for one in pair if both_ready else [pair[first_out]]:
        one.ready()
    driver(4500)  # the other one's
    pair[first_out].ended()
    pair[first_out].prove_given_back()
    pair[1 - first_out].ended()
    if both_ready:
        with pytest.raises(DraftlineError, match="did not come back"):
            pair[1 - first_out].prove_given_back()
