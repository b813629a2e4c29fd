"""The servers of a search: none of them outlives it."""

import os
import socket
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.server import Server
from tasks.common.server_session import LOGS, Process, ServerRecord, boot_id, record_path
from tasks.common.target import target_contract
from tasks.tune_server.candidates import PLAIN, Candidate, Shape
from tasks.tune_server.servers import Budget, Fleet
from tests.ports import free_port_pair
from tests.random_draft import write_random_draft


class NeverLaunched(Server):
    """Notes that it was stopped, and may fail to."""

    def __init__(self, plan, fails: bool):
        super().__init__(plan)
        self.stopped, self._fails = False, fails

    def stop(self) -> None:
        self.stopped = True
        if self._fails:
            raise DraftlineError(f"port {self.plan.port} does not become free")


def test_a_server_that_cannot_be_stopped_leaves_none_of_the_others_behind(params):
    candidates = [PLAIN, Candidate(Shape.chain(1)), Candidate(Shape.chain(2))]
    servers = [
        NeverLaunched(candidate.plan(params, 47_000 + number), fails=number == 2)
        for number, candidate in enumerate(candidates)
    ]
    with pytest.raises(DraftlineError, match="port 47002 does not become free"), Fleet(params, Budget(60)) as fleet:
        fleet.running.update(zip(candidates, servers, strict=True))
    assert all(server.stopped for server in servers)
    assert not fleet.running


def starting(port: int) -> None:
    """Another run's server, on whose port nobody listens yet."""
    other = Process.of(os.getppid())
    LOGS.mkdir(exist_ok=True)
    ServerRecord("speculative", port, boot_id(), other, (other,)).write(record_path("speculative", port))


def listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


class Beaten(Fleet):
    """Whose first port another run takes as soon as it is chosen."""

    def __init__(self, params, take):
        super().__init__(params, Budget(60))
        self.chosen, self._take = [], take

    def _free_port(self) -> int:
        self.chosen.append(super()._free_port())
        if len(self.chosen) == 1:
            self.held = self._take(self.chosen[0])
        return self.chosen[-1]


@pytest.fixture
def params(project, tiny_params):
    made = tiny_params(contract={"aux_layer_ids": [1, 3, 4]}, serve={"context_length": 512, "port": free_port_pair()})
    write_random_draft(Path("artifacts/export"), target_contract(made.contract))
    return made


def test_a_port_of_another_run_is_passed_over_before_anybody_listens_on_it(params):
    starting(params.serve.port)
    assert Fleet(params, Budget(60))._free_port() == params.serve.port + 1


@pytest.mark.parametrize("take", [starting, listening])
def test_a_port_that_another_run_takes_just_before_the_start_costs_no_candidate(params, take):
    with Beaten(params, take) as fleet:
        fleet._launch(PLAIN)
        first, second = fleet.chosen
        assert fleet.running[PLAIN].plan.port == second > first
    if fleet.held:
        fleet.held.close()


def test_ports_that_run_out_are_a_sentence(params):
    last = params.model_copy(update={"serve": params.serve.model_copy(update={"port": 65_534})})
    with socket.socket() as one, socket.socket() as other:
        for listener, port in ((one, 65_534), (other, 65_535)):
            listener.bind(("127.0.0.1", port))
            listener.listen()
        with pytest.raises(
            DraftlineError, match=r"no port from 65534 on is free for another server\. Lower serve\.port"
        ):
            Fleet(last, Budget(60))._free_port()
