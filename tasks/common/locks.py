"""Locks on files: who works on a folder now. The kernel drops the locks of a process that dies.

The files lie beside the folder, which is DVC's output. NFS locks a file that is open for writing, and no folder. What a
file says of its holder counts while it is locked alone.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.common.errors import DraftlineError


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The lock file of this path, made if need be, as a descriptor.

    Raises:
        DraftlineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be written: {error.strerror}.") from None
    try:
        yield file
    finally:
        os.close(file)


def locks_alone(file: int) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_alone(file: int, waiting: str) -> None:
    """Take the lock as soon as nobody has it.

    Args:
        waiting: what is said to people where somebody has it; `{}` stands for the process.
    """
    if not locks_alone(file):
        print(waiting.format(read(file)), file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    _name_holder(file)


def write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def read(file: int) -> str:
    return os.pread(file, 256, 0).decode(errors="replace")


@contextmanager
def alone_on(path: Path, refusal: str) -> Iterator[None]:
    """Nobody else within the block of the same path.

    Args:
        refusal: what is said of somebody who is; `{}` stands for the process.

    Raises:
        DraftlineError: somebody is, or the lock cannot be written.
    """
    with opened(path) as file:
        if not locks_alone(file):
            raise DraftlineError(refusal.format(read(file)))
        _name_holder(file)
        yield


def _name_holder(file: int) -> None:
    with suppress(OSError):  # a full disk: the lock holds all the same
        write(file, f"pid {os.getpid()} on {socket.gethostname()}")
