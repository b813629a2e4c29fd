"""One real SGLang server with hooks, over the tiny target on the CPU: its states are transformers', whatever the batch."""

from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.server_session import port_is_free
from tasks.common.target import TARGET, target_contract
from tasks.dump_hidden_states.engines import open_engine
from tasks.dump_hidden_states.states_plan import require_fits
from tasks.prepare_target.prepare import prepare_target
from tests.dump_hidden_states.hooked_server import (
    States,
    alone_in_transformers,
    assert_layers_differ,
    assert_same,
    dumped,
    params_of,
    random_sequences,
    shard_of,
)


@pytest.fixture(scope="module")
def params(tmp_path_factory, tiny_model_folder):
    """The current directory is its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("states"))
        params = params_of(tiny_model_folder)
        prepare_target(params.target, TARGET)
        yield params


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    return random_sequences()


@pytest.fixture(scope="module")
def compute(params):
    with open_engine(params, target_contract(params.contract)) as compute:
        yield compute
    assert port_is_free(params.serve.port)
    assert not list(Path("logs").glob("states-*"))


@pytest.fixture(scope="module")
def alone(params, sequences) -> States:
    return alone_in_transformers(params, sequences)


def test_states_are_transformers_at_every_layer_in_chunks_and_in_batches(compute, sequences, alone):
    assert_same(dumped(compute, "many", [shard_of(sequences)]), alone)


def test_one_request_at_a_time_gives_the_states_of_many_at_once(compute, sequences, alone):
    for number in (1, 6, 9):
        assert_same(dumped(compute, f"one-{number}", [shard_of([sequences[number]])]), [alone[number]])


def test_many_shards_are_in_flight_and_each_gets_its_own_rows(compute, sequences, alone):
    shards = [shard_of(sequences[number : number + 2], number) for number in range(0, 12, 2)]
    assert_same(dumped(compute, "flight", shards), alone)


def test_the_wrong_layer_is_nowhere_near(alone):
    assert_layers_differ(alone)


def test_the_longest_sequence_that_the_server_says_it_takes_is_dumped_and_the_next_one_is_refused(compute):
    info = compute.server.server_info()
    most = info["max_req_input_len"] - 1
    assert 100 < most < 128
    require_fits(info, most, "sample")
    [sample] = dumped(compute, "longest", [shard_of([[5] * most])])
    assert sample.num_tokens == most
    with pytest.raises(DraftlineError, match="takes"):
        require_fits(info, most + 1, "sample")
    with pytest.raises(DraftlineError, match="exceeds the maximum allowed length"):
        compute.server.prefill([[5] * (most + 1)], ["too long"])
