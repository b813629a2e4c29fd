"""Processes of a measurement that is bounded in time: what they are started with, and that all of them end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from infra.gpu.places import ROOT
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.server_session import LOGS, reap_stale_servers

# NVLink multicast may be unavailable on shared hosts; what is started here does without it: NCCL, torch, NVSHMEM.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_GRACE_S, _POLL_S = 10.0, 1.0
_TAIL = 1500  # characters of a log that say why


class Found:
    """What a part has found so far, in its file after each step: the time may run out."""

    def __init__(self, path: Path, deadline: float):
        """
        Args:
            deadline: of the part, as `time.time` counts.
        """
        self.path, self.deadline = path, deadline
        self.values: dict[str, Any] = {}

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.time()

    def note(self, name: str, value: Any) -> None:
        self.values[name] = value
        write_json(self.path, self.values)

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Note what `work` returns, or why it did not; the next one goes on."""
        began = time.perf_counter()
        try:
            value = work()
        except Exception as error:
            value = {"failed": f"{type(error).__name__}: {error}"}
        self.note(name, value | {"seconds": round(time.perf_counter() - began, 1)})
        print(f"{name}: {value}", flush=True)


def module_command(module: str, *arguments: str, processes: int = 1) -> list[str]:
    """A module in this interpreter, or under torchrun in so many processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else ()), "-m", module, *arguments]


def run(command: list[str], folder: Path, log: Path, seconds: float) -> None:
    """Run to the end, in `folder`, with its output in `log`; what it started is ended with it, in whatever session.

    Raises:
        DraftlineError: it failed or took longer; quotes the end of its log.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **WITHOUT_MULTICAST, "PYTHONPATH": os.pathsep.join(paths)}
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with open(log, "wb") as output:
        process = psutil.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    family: set[psutil.Process] = set()  # as it was seen: whose parent is gone is not found below it any more
    try:
        while process.poll() is None and time.monotonic() < deadline:
            family.update(_below(process))
            with suppress(psutil.TimeoutExpired):
                process.wait(_POLL_S)
        code = process.poll()
    finally:
        _end(process, family | _below(process), folder)
    if code != 0:
        why = f"ended after {seconds:.0f} s, which is all it may take" if code is None else f"exit code {code}"
        text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").strip()
        raise DraftlineError(f"{why}: {text.rpartition(chr(10))[2]}\n{log} ends with:\n{text[-_TAIL:]}")


def _below(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _end(process: psutil.Popen, family: set[psutil.Process], folder: Path) -> None:
    """SIGTERM, then SIGKILL to it and to all that was seen below it, then to servers by their records."""
    if process.poll() is None:
        process.terminate()
        with suppress(psutil.TimeoutExpired):
            process.wait(_GRACE_S)
    for member in (process, *family):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs([process, *family], timeout=_GRACE_S)
    for sentence in reap_stale_servers(folder / LOGS):
        print(sentence, flush=True)
