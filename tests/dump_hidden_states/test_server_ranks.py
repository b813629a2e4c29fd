"""Two ranks of one host, each with a real server of its own; one of them is killed, its server left behind."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.parity import Agreement
from tasks.common.responses import RESPONSES, Response
from tasks.common.server_session import ServerRecord, record_path, session_processes
from tasks.common.target import load_model, target_contract
from tasks.dump_hidden_states.capture import Capture
from tasks.dump_hidden_states.dump import dump
from tests.flows.processes import until
from tests.ports import free_port_pair

pytestmark = pytest.mark.faults
TRAIN = HIDDEN_STATES / "train"


def start(params, rank: int):
    def run() -> None:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun sets it
        dump(params)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


@pytest.mark.parametrize("storage_dtype", ["float8", "bfloat16"])
def test_a_rank_is_killed_and_run_again_alone(project, tiny_params, storage_dtype):
    torch.manual_seed(0)
    for split, count in (("train", 120), ("heldout", 3)):
        rows = [
            Response(f"{split}-{n}", "", [], torch.randint(3, 320, (20 + n % 40,)).tolist(), [7, 8, 9], "", "stop")
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    params = tiny_params(
        dump={"engine": "sglang", "storage_dtype": storage_dtype, "shard_tokens": 60},
        serve={"port": free_port_pair(), "context_length": 128, "max_total_tokens": 2048},
    )
    load_model(params.target)  # imports, once for both
    ranks = [start(params, rank) for rank in range(2)]
    try:
        until(lambda: list(TRAIN.glob("shard-*[13579].json")), every=0.01)
        orphan = ServerRecord.read(record_path("states", params.serve.port + 2)).processes[0]
        ranks[1].kill()
        ranks[1].join()
        assert ranks[1].exitcode == -signal.SIGKILL
        assert orphan.is_alive
        ranks.append(start(params, 1))
        for process in (ranks[0], ranks[2]):
            process.join()
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert session_processes(orphan.pid) == ()
    assert not list(Path("logs").glob("server-*.json"))
    assert not list(Path("logs").glob("states-*"))
    states = HiddenStates(TRAIN)
    assert states.ids == [f"train-{n}" for n in range(120)]
    capture = Capture(load_model(params.target), target_contract(params.contract).aux_layer_ids)
    limit = {"float8": 0.05, "bfloat16": 0.005}[storage_dtype]
    for index in range(0, 120, 11):
        sample = states.read(index)
        [(aux, last)] = capture.run([sample.input_ids.tolist()])
        for slot in range(aux.shape[1]):
            assert 1e-6 < Agreement.of(sample.aux[:, slot], aux[:, slot]).relative_error < limit
        assert Agreement.of(sample.last, last).relative_error < limit
