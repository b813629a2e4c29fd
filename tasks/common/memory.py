"""Memory of this machine, as a container sees it."""

from contextlib import suppress
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory(control_group: Path = _CONTROL_GROUP) -> int:
    """Bytes that new processes can take: the host's, within the limit of this control group (a container's)."""
    import psutil

    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no limit, or another version of control groups
        limit = int((control_group / "memory.max").read_text())
        used = int((control_group / "memory.current").read_text())
        statistics = dict(line.split() for line in (control_group / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(statistics.get("inactive_file", 0)))
    return available
