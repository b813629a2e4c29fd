"""The servers of a search: none of them outlives it."""

import os
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


def test_a_server_that_cannot_be_stopped_leaves_none_of_the_others_behind(project, tiny_params):
    params = tiny_params(contract={"aux_layer_ids": [1, 3, 4]}, serve={"context_length": 512})
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))
    candidates = [PLAIN, Candidate(Shape.chain(1)), Candidate(Shape.chain(2))]
    servers = [
        NeverLaunched(candidate.plan(params, 47_000 + number), fails=number == 2)
        for number, candidate in enumerate(candidates)
    ]
    with pytest.raises(DraftlineError, match="port 47002 does not become free"), Fleet(params, Budget(60)) as fleet:
        fleet.running.update(zip(candidates, servers, strict=True))
    assert all(server.stopped for server in servers)
    assert not fleet.running


def test_a_port_of_another_run_is_passed_over_before_anybody_listens_on_it(project, tiny_params):
    params = tiny_params(contract={"aux_layer_ids": [1, 3, 4]}, serve={"context_length": 512, "port": free_port_pair()})
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))
    port, other = params.serve.port, Process.of(os.getppid())
    LOGS.mkdir()
    ServerRecord("speculative", port, boot_id(), other, (other,)).write(record_path("speculative", port))
    assert Fleet(params, Budget(60))._free_port() == port + 1
