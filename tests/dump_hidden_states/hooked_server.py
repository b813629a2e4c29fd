"""What tests ask of a real server with hooks: parameters that cut prompts into chunks, sequences, their states."""

from pathlib import Path

import torch

from tasks.common.hidden_states import Sample
from tasks.common.params import Params
from tasks.common.parity import Agreement
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.target import load_model
from tasks.dump_hidden_states.capture import Capture
from tests.ports import free_port_pair

LAYERS = tuple(range(7))  # every output that the contract allows of 8 layers
_CHUNK = 32
# Below, at and beyond one chunk of prefill, and beyond two.
_LENGTHS = (1, 2, 5, 31, 32, 33, 50, 64, 65, 90, 7, 40)

States = list[tuple[torch.Tensor, torch.Tensor]]


def params_of(model_folder: Path) -> Params:
    """Of a server that cuts prompts into chunks of 32 tokens."""
    return Params.model_validate(
        {
            "target": {"model": str(model_folder)},
            "contract": {"aux_layer_ids": LAYERS},
            "dump": {"engine": "sglang"},
            "serve": {
                "port": free_port_pair(),
                "context_length": 128,
                "max_total_tokens": 2048,
                "extra_args": ["--chunked-prefill-size", str(_CHUNK)],
            },
        }
    )


def random_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in _LENGTHS]


def alone_in_transformers(params: Params, sequences: list[list[int]]) -> States:
    """What transformers computes of each sequence by itself."""
    capture = Capture(load_model(params.target), LAYERS)
    return [capture.run([sequence])[0] for sequence in sequences]


def shard_of(sequences: list[list[int]], number: int = 0) -> ShardPlan:
    rows = [(f"sample-{number}-{index}", ids, [1] * len(ids)) for index, ids in enumerate(sequences)]
    return ShardPlan.of(f"shard-{number:05d}", f"plan-{number}", rows)


def dumped(compute, folder: str, shards: list[ShardPlan]) -> list[Sample]:
    """What the server's hooks wrote of each sample."""
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


def assert_same(samples: list[Sample], expected: States) -> None:
    for sample, (aux, last) in zip(samples, expected, strict=True):
        for slot in range(len(LAYERS)):
            assert Agreement.of(sample.aux[:, slot], aux[:, slot]).relative_error < 1e-4, (sample.id, slot)
        assert Agreement.of(sample.last, last).relative_error < 1e-4, sample.id


def assert_layers_differ(expected: States) -> None:
    """By far more than that limit: it tells them apart."""
    aux, _ = expected[9]
    for slot in range(len(LAYERS) - 1):
        assert Agreement.of(aux[:, slot + 1], aux[:, slot]).relative_error > 0.01
