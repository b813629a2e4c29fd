"""Whether the states have room, before the first of them is computed and before anything is removed."""

import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.params import Params
from tasks.dump_hidden_states.split_plan import SplitPlan


def require_room(plans: list[SplitPlan], token_bytes: int, params: Params) -> None:
    """What is taken over has its room; what is left over makes room. A RAM disk may be mounted on the folder of a split.

    Raises:
        DraftlineError: a disk or the quota cannot hold the states; names the options.
    """
    on_disk: dict[int, list[SplitPlan]] = defaultdict(list)
    for plan in plans:
        on_disk[plan.folder.stat().st_dev].append(plan)
    for sharing in on_disk.values():
        coming = sum(plan.tokens_to_come for plan in sharing) * token_bytes
        left_over = sum(_size(path) for plan in sharing for path in plan.leftovers())
        room = shutil.disk_usage(sharing[0].folder).free + left_over
        if coming > room:
            where = " and ".join(str(plan.folder) for plan in sharing)
            raise _refused(
                plans,
                token_bytes,
                f"{coming / 1e9:.1f} GB of them are not there yet, and the disk of {where} has room for {room / 1e9:.1f} GB",
            )
    quota = params.dump.max_gigabytes
    if quota is not None and _held(plans, token_bytes) > quota * 1e9:
        raise _refused(plans, token_bytes, f"dump.max_gigabytes allows {quota:g} GB")


def _held(plans: list[SplitPlan], token_bytes: int) -> int:
    return sum(plan.tokens_at_once for plan in plans) * token_bytes


def _refused(plans: list[SplitPlan], token_bytes: int, limit: str) -> DraftlineError:
    return DraftlineError(
        f"{HIDDEN_STATES}: the hidden states need {_held(plans, token_bytes) / 1e9:.1f} GB, {limit}. Options: dump.storage_dtype: "
        f"bfloat16 (half of float32) or float8 (a quarter), fewer prompts (prompts.max_train), shorter answers "
        f"(regenerate.max_new_tokens), training while the dump goes on (dump.ahead_shards), or a larger disk mounted there."
    )


def _size(path: Path) -> int:
    """Bytes of a file, which another rank may just have renamed."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
