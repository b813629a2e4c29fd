"""A bounded ring of shards: the dump writes them while a reader consumes and frees them, in the order of the plan.

For targets whose states no disk can hold: 57 KB a token at H = 7168. The ring is the folder of the split, on a RAM
disk or a real one. A shard that was freed leaves `shard-00000.freed`, its sidecar, so that either side can be run
again after it died: the dump computes what is neither there nor freed, the reader goes on with what is not freed.
A new epoch begins when these marks are removed (`forget_freed`) and the dump is started again.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.shard import StoredShard, read_mark, shard_is_done
from tasks.common.shard_layout import ShardPlan

_POLL_S = 0.02
_QUIET_S = 10.0  # a reader that waits longer says for what
_PATIENCE_S = 3600


def is_freed(folder: Path, name: str, plan_sha256: str) -> bool:
    """Whether a shard of this very plan was consumed."""
    return read_mark(_freed(folder, name)).get("plan_sha256") == plan_sha256


def was_written(folder: Path, name: str, plan_sha256: str) -> bool:
    """Whether a shard of this very plan is there or was consumed; in this order, since one becomes the other meanwhile."""
    return shard_is_done(folder, name, plan_sha256) or is_freed(folder, name, plan_sha256)


def forget_freed(folder: Path) -> None:
    """Begin a new epoch: what was consumed counts as missing."""
    for path in folder.glob("shard-*.freed"):
        path.unlink()


def bounded(
    folder: Path, shards: Iterable[ShardPlan], room: int, patience_s: float = _PATIENCE_S
) -> Iterator[ShardPlan | None]:
    """Yield which of one rank's shards to compute, so that at most `room` of them wait to be consumed.

    Only these shards count, and only those before the next one: what an earlier run, another rank or another plan
    left cannot keep the shard back that the reader waits for.

    Yields:
        None while there is no room, so that who computes can look after what is in flight.

    Raises:
        DraftlineError: nothing was consumed for `patience_s`.
    """
    waiting: list[ShardPlan] = []
    for shard in shards:
        began = time.monotonic()
        while True:
            waiting = [s for s in waiting if not is_freed(folder, s.name, s.sha256)]
            if len(waiting) < room:
                break
            if time.monotonic() - began > patience_s:
                raise DraftlineError(
                    f"{folder / waiting[0].name}: not consumed within {patience_s:.0f} s, and dump.ahead_shards lets no more wait. "
                    f"Does its reader still run? To keep all states on the disk set dump.ahead_shards: null."
                )
            yield None
            time.sleep(_POLL_S)
        waiting.append(shard)
        if not was_written(folder, shard.name, shard.sha256):
            yield shard


def consume(
    folder: Path,
    shards: Iterable[ShardPlan],
    check: Callable[[Path, ShardPlan], None],
    patience_s: float = _PATIENCE_S,
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
        began, said = time.monotonic(), False
        while not shard_is_done(folder, shard.name, shard.sha256):
            waited = time.monotonic() - began
            if waited > _QUIET_S and not said:
                print(f"{path}: waiting for the dump to write it, for {patience_s:.0f} s at most", flush=True)
                said = True
            if waited > patience_s:
                raise DraftlineError(
                    f"{path}: not written within {patience_s:.0f} s. Does the dump still run, with the same params.yaml? Start it "
                    f"again: `python -m tasks.dump_hidden_states`. It goes on where it was."
                )
            time.sleep(_POLL_S)
        check(folder, shard)
        yield shard, StoredShard(path)
        path.with_suffix(".json").replace(_freed(folder, shard.name))
        path.unlink()


def _freed(folder: Path, name: str) -> Path:
    return folder / f"{name}.freed"
