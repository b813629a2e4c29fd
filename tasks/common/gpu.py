"""Memory in use on NVIDIA GPUs, as the driver sees it."""

import os
import shutil
import subprocess
from collections.abc import Iterable


def memory_used_mib() -> dict[int, int]:
    """MiB in use by GPU index; empty on a machine without NVIDIA's driver, without the GPUs of which it does not say."""
    return {int(index): int(used) for index, used in query("--query-gpu=index,memory.used") if used.isdigit()}


def processes() -> dict[int, int]:
    """MiB in use by pid; a container may see none of them, or pids of its host."""
    rows = query("--query-compute-apps=pid,used_memory")
    return {int(pid): int(used) for pid, used in rows if pid.isdigit() and used.isdigit()}


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
    """Rows of cells that `nvidia-smi` answers; none on a machine without it."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
