"""A bounded ring of shards: the dump writes them while a reader consumes and frees them, in the order of the plan.

For targets whose states no disk can hold: 57 KB a token at H = 7168. The ring is the folder of the split, on a RAM
disk or a real one. A shard that was freed leaves `shard-00000.freed`, its sidecar, so that either side can be run
again after it died: the dump computes what is neither there nor freed, the reader goes on with what is not freed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.shard import ShardPlan, StoredShard, shard_is_done

_POLL_S = 0.02


def is_freed(folder: Path, name: str, plan_sha256: str) -> bool:
    """Whether a shard of this very plan was consumed."""
    freed = _freed(folder, name)
    return freed.exists() and read_json(freed)["plan_sha256"] == plan_sha256


def bounded(folder: Path, shards: Iterable[ShardPlan], room: int) -> Iterator[ShardPlan]:
    """Yield shards to compute, waiting while `room` of them are being written or wait to be consumed."""
    begun: list[ShardPlan] = []
    for shard in shards:
        while True:
            begun = [s for s in begun if not (_is_done(folder, s) or is_freed(folder, s.name, s.sha256))]
            if len(begun) + sum(1 for _ in folder.glob("shard-*.json")) < room:
                break
            time.sleep(_POLL_S)
        begun.append(shard)
        yield shard


def consume(
    folder: Path, shards: Iterable[ShardPlan], check: Callable[[Path, ShardPlan], None], patience_s: float = 3600
) -> Iterator[tuple[ShardPlan, StoredShard]]:
    """Yield each shard once it is there and has passed `check`; it is freed when the next one is asked for.

    Raises:
        DraftlineError: `check` refuses a shard, or none came for `patience_s`.
    """
    for shard in shards:
        path = folder / f"{shard.name}.safetensors"
        if is_freed(folder, shard.name, shard.sha256):
            path.unlink(missing_ok=True)  # the reader died between the two
            continue
        began = time.monotonic()
        while not _is_done(folder, shard):
            if time.monotonic() - began > patience_s:
                raise DraftlineError(
                    f"{path}: not written within {patience_s:.0f} s. Does the dump still run, with the same params.yaml? Start it "
                    f"again: `python -m tasks.dump_hidden_states`. It goes on where it was."
                )
            time.sleep(_POLL_S)
        check(folder, shard)
        yield shard, StoredShard(path)
        (folder / f"{shard.name}.json").replace(_freed(folder, shard.name))
        path.unlink()


def _is_done(folder: Path, shard: ShardPlan) -> bool:
    try:
        return shard_is_done(folder, shard.name, shard.sha256)
    except DraftlineError:  # freed between two looks at it
        return False


def _freed(folder: Path, name: str) -> Path:
    return folder / f"{name}.freed"
