"""Two engines behind one call: planned shards in, shards on the disk out."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.params import Params
from tasks.common.shard import ShardPlan, ShardWriter
from tasks.common.storage import StoredRows
from tasks.common.target import load_model

# Writes each shard into the folder and yields it once it is there whole.
Compute = Callable[[Path, Iterable[ShardPlan]], Iterator[ShardPlan]]


def open_engine(params: Params, contract: Contract) -> AbstractContextManager[Compute]:
    """`with open_engine(...) as compute: for shard in compute(folder, shards)`, for `params.dump.engine`."""
    params = on_this_gpu(params)
    if params.dump.engine == "transformers":
        return _transformers(params, contract)
    from tasks.dump_hidden_states.sglang_engine import sglang_engine

    return sglang_engine(params, contract)


def on_this_gpu(params: Params) -> Params:
    """Under torchrun each rank of a host has a GPU of its own (or as many as its server spans) and a port of its own."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    span = tensor_parallel_size(params.serve.extra_args) if params.dump.engine == "sglang" else 1
    device = f"cuda:{local * span}" if params.target.device == "cuda" and local else params.target.device
    return params.model_copy(
        update={
            "target": params.target.model_copy(update={"device": device}),
            "serve": params.serve.model_copy(update={"port": params.serve.port + 2 * local}),
        }
    )


def tensor_parallel_size(extra_args: tuple[str, ...]) -> int:
    """GPUs that one server spans."""
    for name, value in pairwise((*extra_args, "1")):
        flag, _, inline = name.partition("=")
        if flag in ("--tp", "--tp-size", "--tensor-parallel-size"):
            return int(inline or value)
    return 1


@contextmanager
def _transformers(params: Params, contract: Contract) -> Iterator[Compute]:
    from tasks.dump_hidden_states.capture import Capture

    capture = Capture(load_model(params.target), contract.aux_layer_ids)
    sizes = (len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)

    def compute(folder: Path, shards: Iterable[ShardPlan]) -> Iterator[ShardPlan]:
        for shard in shards:
            with ShardWriter(folder, shard, *sizes) as writer:
                for batch in batches(shard, params.dump.batch_tokens):
                    states = capture.run([shard.sequence(index) for index in batch])
                    for index, (aux, last) in zip(batch, states, strict=True):
                        rows = StoredRows.of(aux, last, params.dump.storage_dtype)
                        writer.write(int(shard.offsets[index]), rows.map(lambda tensor: tensor.cpu()))
            yield shard

    yield compute


def batches(shard: ShardPlan, batch_tokens: int) -> Iterator[list[int]]:
    """Batches of similar lengths, at most `batch_tokens` with padding (a longer answer goes alone)."""
    lengths = (shard.offsets[1:] - shard.offsets[:-1]).tolist()
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], shard.ids[index])):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch
