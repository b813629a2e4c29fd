"""Memory in use on NVIDIA GPUs, as the driver sees it."""

import os
import shutil
import subprocess
from collections.abc import Iterable

from tasks.common.errors import DraftlineError

_ANSWER_S = 30


def memory_used_mib() -> dict[int, int]:
    """MiB in use by GPU index; empty on a machine without NVIDIA's driver, without the GPUs of which it does not say."""
    return {int(index): int(used) for index, used in query("--query-gpu=index,memory.used") if used.isdigit()}


def holders() -> dict[int, dict[int, int]]:
    """MiB in use by GPU index and pid; a container may see none of them, or pids of its host."""
    index = {uuid: int(number) for number, uuid in query("--query-gpu=index,uuid")}
    found: dict[int, dict[int, int]] = {}
    for uuid, pid, used in query("--query-compute-apps=gpu_uuid,pid,used_memory"):
        if uuid in index and pid.isdigit() and used.isdigit():
            found.setdefault(index[uuid], {})[int(pid)] = int(used)
    return found


def physical(indices: Iterable[int]) -> set[int] | None:
    """The driver's indices of GPUs as a process counts them; None where CUDA_VISIBLE_DEVICES does not say it in numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return set(indices)
    names = [name.strip() for name in visible.split(",")]
    if not all(name.isdigit() for name in names):
        return None
    return {int(names[index]) for index in indices if index < len(names)}


def query(what: str) -> list[list[str]]:
    """Rows of cells that `nvidia-smi` answers; none on a machine without it.

    Raises:
        DraftlineError: it failed or gave no answer in time.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_answer(what, str(error)) from None
    if done.returncode:
        raise _no_answer(what, f"it ended with code {done.returncode} and said {(done.stdout + done.stderr).strip()!r}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _no_answer(what: str, why: str) -> DraftlineError:
    return DraftlineError(
        f"nvidia-smi {what}: {why}. Expected: NVIDIA's driver says what its GPUs are and hold. See that `nvidia-smi` alone does; else "
        f"load the driver that is installed (after an update: restart the machine), or set target.device: cpu."
    )
