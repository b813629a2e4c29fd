"""Two engines behind one call: planned shards in, shards on the disk out."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.server_plan import spanned_gpus
from tasks.common.shard import ShardWriter
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows
from tasks.common.target import load_model

# Writes each shard into the folder and yields it once it is there whole. None among them says: nothing to begin now.
Compute = Callable[[Path, Iterable[ShardPlan | None]], Iterator[ShardPlan]]


def open_engine(
    params: Params, contract: Contract, longest: tuple[int, str] = (0, "")
) -> AbstractContextManager[Compute]:
    """`with open_engine(...) as compute: for shard in compute(folder, shards)`, for `params.dump.engine`.

    Args:
        longest: tokens and name of the longest sample that is to come: a server that cannot take it says so now.
    """
    params = on_this_gpu(params)
    if params.dump.engine == "transformers":
        return _transformers(params, contract)
    from tasks.dump_hidden_states.sglang_engine import sglang_engine

    return sglang_engine(params, contract, longest)


def require_devices_of_its_own(params: Params) -> None:
    """Ranks of one host do not load the target onto the same devices.

    Raises:
        DraftlineError: target.device_map takes all devices that are visible, and another rank of this host would too.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if params.dump.engine == "transformers" and params.target.device_map and ranks > 1:
        raise DraftlineError(
            f"{PARAMS}: target.device_map is {params.target.device_map}, which spreads the target over all GPUs of a host, and each "
            f"of the {ranks} ranks here would do that. Start one rank a host (torchrun --nproc-per-node 1), or set target.device_map: "
            f"null and target.device: cuda, which gives each rank a GPU of its own."
        )


def on_this_gpu(params: Params) -> Params:
    """Under torchrun each rank of a host has a GPU of its own (or as many as its server spans) and a port of its own.

    The first rank has the GPU that `target.device` names, the next ones follow.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    span = spanned_gpus(params.serve.extra_args) if params.dump.engine == "sglang" else 1
    kind, _, first = params.target.device.partition(":")
    device = f"cuda:{int(first or 0) + local * span}" if kind == "cuda" and local else params.target.device
    return params.model_copy(
        update={
            "target": params.target.model_copy(update={"device": device}),
            "serve": params.serve.model_copy(update={"port": params.serve.port + 2 * local}),
        }
    )


@contextmanager
def _transformers(params: Params, contract: Contract) -> Iterator[Compute]:
    from tasks.dump_hidden_states.capture import Capture

    capture = Capture(load_model(params.target), contract.aux_layer_ids)
    sizes = (len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)

    def compute(folder: Path, shards: Iterable[ShardPlan | None]) -> Iterator[ShardPlan]:
        for shard in filter(None, shards):
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
