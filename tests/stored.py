"""Hidden states written by tests, in the format that the dump writes."""

from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.hidden_states import HiddenStates, Sample, close_split
from tasks.common.shard import ShardWriter
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows


def write_shard(folder: Path, name: str, samples: list[Sample], plan_sha256: str, storage_dtype: str = "float32"):
    """A shard of these samples."""
    plan = ShardPlan.of(name, plan_sha256, [(s.id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples])
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, plan, *samples[0].aux.shape[1:], storage_dtype) as shard:
        for start, sample in zip(plan.offsets.tolist(), samples, strict=False):
            shard.write(start, StoredRows.of(sample.aux, sample.last, storage_dtype))


def write_split(
    folder: Path, contract: Contract, shards: list[list[Sample]], storage_dtype: str = "float32"
) -> HiddenStates:
    """A whole split, a list of samples a shard."""
    names = [f"shard-{number:05d}" for number in range(len(shards))]
    for name, samples in zip(names, shards, strict=True):
        write_shard(folder, name, samples, "plan", storage_dtype)
    close_split(folder, contract, storage_dtype, {"name": "test", "version": None}, names)
    return HiddenStates(folder)


def close_again(states: HiddenStates) -> None:
    """Write table and manifest of a split whose shards a test has replaced."""
    names = [shard["name"] for shard in states.shards]
    close_split(states.folder, states.contract, states.storage_dtype, states.engine, names)


def copy_of(sample: Sample) -> Sample:
    """A sample of its own, which lives on when its shard is replaced, and may be changed."""
    return Sample(sample.id, *(t.clone() for t in (sample.input_ids, sample.loss_mask, sample.aux, sample.last)))
