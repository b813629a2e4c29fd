"""One real SGLang server with hooks, over the tiny target on the CPU: its states are transformers', whatever the batch."""

from pathlib import Path

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import Sample
from tasks.common.parity import Agreement
from tasks.common.server_session import port_is_free
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.target import load_model, target_contract
from tasks.dump_hidden_states.capture import Capture
from tasks.dump_hidden_states.engines import open_engine
from tests.ports import free_port_pair

LAYERS = tuple(range(7))  # every output that the contract allows of 8 layers
CHUNK = 32
# Below, at and beyond one chunk of prefill, and beyond two.
LENGTHS = (1, 2, 5, 31, 32, 33, 50, 64, 65, 90, 7, 40)


@pytest.fixture(scope="module")
def params(tmp_path_factory, tiny_model_folder):
    """Of a server that cuts prompts into chunks of 32 tokens; the current directory is its own."""
    from tasks.common.params import Params
    from tasks.common.target import TARGET
    from tasks.prepare_target.prepare import prepare_target

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("states"))
        params = Params.model_validate(
            {
                "target": {"model": str(tiny_model_folder)},
                "contract": {"aux_layer_ids": LAYERS},
                "dump": {"engine": "sglang"},
                "serve": {
                    "port": free_port_pair(),
                    "context_length": 128,
                    "max_total_tokens": 2048,
                    "extra_args": ["--chunked-prefill-size", str(CHUNK)],
                },
            }
        )
        prepare_target(params.target, TARGET)
        yield params


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def compute(params):
    with open_engine(params, target_contract(params.contract)) as compute:
        yield compute
    assert port_is_free(params.serve.port)
    assert not list(Path("logs").glob("states-*"))


@pytest.fixture(scope="module")
def alone(params, sequences) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What transformers computes of each sequence by itself."""
    capture = Capture(load_model(params.target), LAYERS)
    return [capture.run([sequence])[0] for sequence in sequences]


def shard_of(sequences: list[list[int]], number: int = 0) -> ShardPlan:
    rows = [(f"sample-{number}-{index}", ids, [1] * len(ids)) for index, ids in enumerate(sequences)]
    return ShardPlan.of(f"shard-{number:05d}", f"plan-{number}", rows)


def dumped(compute, folder: str, shards: list[ShardPlan]) -> list[Sample]:
    path = Path(folder)
    path.mkdir()
    assert [shard.name for shard in compute(path, iter(shards))] == [shard.name for shard in shards]
    samples = []
    for shard in shards:
        stored = StoredShard(path / f"{shard.name}.safetensors")
        for index, name in enumerate(shard.ids):
            start, end = shard.offsets[index : index + 2].tolist()
            aux, last = stored.states(start, end)
            samples.append(Sample(name, stored.input_ids[start:end], stored.loss_mask[start:end], aux, last))
    return samples


def assert_same(samples: list[Sample], expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for sample, (aux, last) in zip(samples, expected, strict=True):
        for slot in range(len(LAYERS)):
            assert Agreement.of(sample.aux[:, slot], aux[:, slot]).relative_error < 1e-4, (sample.id, slot)
        assert Agreement.of(sample.last, last).relative_error < 1e-4, sample.id


def test_states_are_transformers_at_every_layer_in_chunks_and_in_batches(compute, sequences, alone):
    assert_same(dumped(compute, "many", [shard_of(sequences)]), alone)


def test_one_request_at_a_time_gives_the_states_of_many_at_once(compute, sequences, alone):
    for number in (1, 6, 9):
        assert_same(dumped(compute, f"one-{number}", [shard_of([sequences[number]])]), [alone[number]])


def test_many_shards_are_in_flight_and_each_gets_its_own_rows(compute, sequences, alone):
    shards = [shard_of(sequences[number : number + 2], number) for number in range(0, 12, 2)]
    assert_same(dumped(compute, "flight", shards), alone)


def test_the_wrong_layer_is_nowhere_near(compute, sequences, alone):
    """The limits above tell layers apart."""
    aux, _ = alone[9]
    for slot in range(len(LAYERS) - 1):
        assert Agreement.of(aux[:, slot + 1], aux[:, slot]).relative_error > 0.01


def test_a_sequence_that_the_server_cannot_take_is_named_before_it_is_sent(compute):
    with pytest.raises(DraftlineError, match=r"sample-0-0 has 128 tokens.*takes 127 and answers one"):
        dumped(compute, "long", [shard_of([[5] * 128])])
