"""What befalls a real SGLang server, on the CPU: it is told at once what happened, and nothing of it is left."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.params import Params
from tasks.common.server import Server
from tasks.common.server_plan import ServerPlan, baseline_plan
from tasks.common.server_session import Process, command_line, port_is_free, session_processes
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import TARGET, target_contract
from tests.flows.processes import until
from tests.launch_server.grandchild import is_grandchild, with_grandchild
from tests.ports import free_port_pair
from tests.random_draft import write_random_draft

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
# Far beyond what a scheduler that is not stopped takes for a sign here, and no minute and a half.
PATIENCE_S = 15


@pytest.fixture(scope="module")
def params(tmp_path_factory, tiny_model_folder) -> Iterator[Params]:
    """Parameters of a run whose target is prepared and whose draft is random; its folder is the current directory."""
    from tasks.prepare_target.prepare import prepare_target

    serve = {"port": free_port_pair(), "context_length": 512, "max_total_tokens": 2048, "max_running_requests": 2}
    settings = {
        "target": {"model": str(tiny_model_folder)},
        "contract": {"aux_layer_ids": (1, 3, 4)},
        "serve": serve,
    }
    params = Params.model_validate(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("faults"))
        prepare_target(params.target, TARGET)
        write_random_draft(Path("artifacts/export"), target_contract(params.contract))
        yield params


@pytest.fixture(scope="module")
def plan(params) -> ServerPlan:
    return with_grandchild(speculative_plan(params))


def of_another_target(plan: ServerPlan, folder: Path) -> ServerPlan:
    flags = [replace(flag, values=(str(folder),)) if flag.name == "--model-path" else flag for flag in plan.flags]
    return replace(plan, target=folder, flags=tuple(flags))


def session(server: Server) -> list[Process]:
    return list(session_processes(server._process.pid))


def scheduler(server: Server) -> Process:
    return next(process for process in session(server) if "sglang::scheduler" in " ".join(command_line(process.pid)))


def grandchildren(processes: list[Process]) -> list[Process]:
    return [process for process in processes if is_grandchild(command_line(process.pid))]


def require_nothing_left(server: Server, processes: list[Process]) -> None:
    assert len(processes) >= 3  # there was something to be left: SGLang's three, and what is planted
    assert not any(process.is_alive for process in processes)
    assert port_is_free(server.plan.port)
    assert not server._record.exists()


@contextmanager
def request_in_flight(server: Server, **how) -> Iterator[Callable[[], str]]:
    """Within the block the server works on an answer; yields what waits for the error that comes in its place."""
    mark = len(server.log.read_text(errors="replace"))
    endless = {"max_new_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.generate, [5, 6, 7], endless, **how)
        until(lambda: "Prefill batch" in server.log.read_text(errors="replace")[mark:])

        def error() -> str:
            with pytest.raises(DraftlineError) as failure:
                answer.result()
            return str(failure.value)

        yield error


@pytest.fixture(scope="module")
def rival(params) -> Iterator[Server]:
    """A server of another target that will have the port of the one that is started next: it was not there yet when
    that one looked."""
    other = shutil.copytree(params.target.model, "other")
    plan = with_grandchild(of_another_target(baseline_plan(params), Path(other).resolve()))
    server = Server(plan, Path("elsewhere"))
    try:
        server.launch()
        until(lambda: "Load weight begin" in server.log.read_text(errors="replace"))
        yield server
    finally:
        server.stop()


def test_a_server_of_another_target_that_took_the_port_meanwhile_does_not_pass_for_ours(params, rival):
    server = Server(baseline_plan(params))
    server.launch()
    processes = session(server)
    try:
        with pytest.raises(DraftlineError) as failure:
            server.wait_until_ready()
    finally:
        server.stop()
    assert f"answers say '{rival.weight_version}', the plan '{server.weight_version}': another server" in str(
        failure.value
    )
    assert f"kill {rival._process.pid}" in str(failure.value)
    assert not any(process.is_alive for process in processes)
    assert not server._record.exists()


def test_a_port_in_use_is_refused_before_anything_starts(params, rival):
    rival.wait_until_ready()
    server = Server(baseline_plan(params))
    with pytest.raises(DraftlineError) as refusal:
        server.launch()
    assert f"port {params.serve.port} is in use by pid {rival._process.pid} (" in str(refusal.value)
    assert "sglang.launch_server" in str(refusal.value)
    assert server._process is None


def test_a_server_that_crashes_in_use_is_told_with_its_end_and_its_stubborn_grandchild_is_gone(rival):
    processes = session(rival)
    with request_in_flight(rival) as error:
        os.kill(scheduler(rival).pid, signal.SIGKILL)
        said = error()
    assert "/generate: no answer" in said
    assert "exit code -9" in said
    assert "crashed with exit code -9" in said
    assert "One of its processes was killed (signal 9): most likely by the kernel, for memory" in said
    with pytest.raises(DraftlineError, match="server died"):
        rival.require_alive()
    assert grandchildren(session(rival))  # SGLang has ended what it knows of; this one is left
    rival.stop()
    require_nothing_left(rival, processes)


@pytest.fixture(scope="module")
def orphans(plan) -> list[Process]:
    """The processes of a server in use whose stage was killed with SIGKILL."""
    stage = """
import pickle, sys, time
from tasks.common.server import Server
with Server(pickle.loads(bytes.fromhex(sys.argv[1]))) as server:
    print(server._process.pid, flush=True)
    time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", stage, pickle.dumps(plan).hex()]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True)
    left = list(session_processes(int(owner.stdout.readline())))
    owner.kill()
    owner.wait()
    return left


@pytest.fixture(scope="module")
def server(plan, orphans) -> Iterator[Server]:
    assert all(process.is_alive for process in orphans)
    assert not port_is_free(plan.port)
    with Server(plan, patience_s=PATIENCE_S) as server:
        yield server


def test_the_next_start_ends_what_a_killed_owner_left_its_grandchild_included(server, orphans):
    assert len(orphans) >= 4
    assert not any(process.is_alive for process in orphans)
    assert server.generate([5, 6], {"max_new_tokens": 2, "ignore_eos": True}).weight_version == server.weight_version


def test_a_server_whose_scheduler_is_stopped_is_ended_and_the_request_in_flight_told_so(server):
    processes, stopped = session(server), scheduler(server)
    with request_in_flight(server, stream=True) as error:
        os.kill(stopped.pid, signal.SIGSTOP)
        said = error()
    assert "/generate: no answer" in said
    assert f"The server hangs: a request waits, and for {PATIENCE_S * 4 // 5} s there was no answer on /health" in said
    assert re.search(rf"Stopped \(state T\): sglang::\w+ \(pid {stopped.pid}\)\.", said)
    assert "start again" in said
    assert "most likely by the kernel" not in said
    server.stop()
    require_nothing_left(server, processes)


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def of_unknown_architecture(folder: Path) -> None:
    config = read_json(folder / "config.json") | {"architectures": ["FooForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_server_that_cannot_load_its_target_says_why(params):
    """Two at once: they only load."""
    told = {}
    for name, spoil in (("cut", cut_short), ("unknown", of_unknown_architecture)):
        folder = shutil.copytree(params.target.model, Path(name).resolve())
        spoil(folder)
        spoiled = params.model_copy(update={"serve": params.serve.model_copy(update={"port": free_port_pair()})})
        told[name] = Server(of_another_target(baseline_plan(spoiled), folder))
    try:
        for server in told.values():
            server.launch()
        said = {}
        for name, server in told.items():
            with pytest.raises(DraftlineError, match="server died while") as failure:
                server.wait_until_ready()
            said[name] = str(failure.value)
    finally:
        for server in told.values():
            server.stop()
    assert "SafetensorError" in said["cut"]
    assert "A file of weights is cut short or damaged" in said["cut"]
    assert "ValueError: Cannot find model module. 'FooForCausalLM'" in said["unknown"]
    assert "does not serve the target's architecture" in said["unknown"]
    for server in told.values():
        assert port_is_free(server.plan.port)
        assert not server._record.exists()
