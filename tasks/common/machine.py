"""The machine that figures were measured on, in words."""

import os
import platform
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tasks.common import gpu


def machine(device: str) -> str:
    """'AMD EPYC, 2 cores'; 'NVIDIA H200, 16 cores'; '8 x NVIDIA H200, 128 cores'.

    Args:
        device: of the target: 'cpu' or 'cuda'.
    """
    names = [processor()] if device == "cpu" else [", ".join(name) for name in gpu.query("--query-gpu=name")]
    counted = [name if count == 1 else f"{count} x {name}" for name, count in Counter(names or [device]).items()]
    return f"{', '.join(counted)}, {cores()} core{'s' * (cores() != 1)}"


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Its name; where the system has none, its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
