"""Processes that tests start, wait for and look for."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

# For what takes seconds on an idle machine.
_PATIENCE_SECONDS = 240


@contextmanager
def running(*command: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    """A process in a session of its own, all of which ends with the block."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


def processes_in(root: Path, name: str = "") -> list[psutil.Process]:
    """Live processes, whoever's children, whose current directory lies in `root`; of this name only, if one is given."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            inside = Path(process.cwd()).is_relative_to(root)
            is_live = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if inside and is_live and name in ("", process.name()):
                found.append(process)
    return found


def until(condition: Callable[[], Any], seconds: float = _PATIENCE_SECONDS, every: float = 0.2) -> Any:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {seconds} s"
        time.sleep(every)
    return value


def get(url: str) -> Any:
    """The JSON that a server answers; None while it does not."""
    with suppress(OSError), urllib.request.urlopen(url) as answer:
        return json.load(answer)
