"""Who works on the shards now: a lock a rank for the whole dump, and one under which a split is closed.

The files lie beside the folder, which is DVC's output. NFS locks a file that is open for writing, and no folder. The
kernel drops the locks of a process that dies; what a file says of its holder counts while it is locked alone.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.dump_hidden_states.share import Share

_CLOSING = HIDDEN_STATES.with_suffix(".lock")
_RANKS = HIDDEN_STATES.with_suffix(".ranks.lock")


@contextmanager
def working_on(share: Share) -> Iterator[None]:
    """Nobody else computes this share, or any shard of it in a dump of another number of ranks.

    Raises:
        DraftlineError: somebody does; names the process. Or the lock cannot be written.
    """
    with ExitStack() as stack:
        # Whoever is alone says how many ranks there are; all hold the lock together from then on.
        ranks = stack.enter_context(_opened(_RANKS))
        if _locks_alone(ranks):
            _write(ranks, str(share.ranks))
        fcntl.flock(ranks, fcntl.LOCK_SH)
        if (others := _read(ranks)) != str(share.ranks):
            raise DraftlineError(
                f"{HIDDEN_STATES}: another dump, of {others} ranks and not {share.ranks}, works on these shards. Wait until it "
                f"ends, or stop it: {HIDDEN_STATES}.rank-*.lock name its processes."
            )
        path = HIDDEN_STATES.with_suffix(f".rank-{share.rank}.lock")
        own = stack.enter_context(_opened(path))
        if not _locks_alone(own):
            raise DraftlineError(
                f"{HIDDEN_STATES}: another dump ({_read(own)}) works on these shards, as rank {share.rank} of {share.ranks}. Wait "
                f"until it ends, or stop it."
            )
        _write(own, f"pid {os.getpid()} on {socket.gethostname()}")
        yield


@contextmanager
def closing_a_split() -> Iterator[None]:
    """Ranks that finish together close a split one after the other, on several hosts too."""
    with _opened(_CLOSING) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be written: {error.strerror}.") from None
    try:
        yield file
    finally:
        os.close(file)


def _locks_alone(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def _read(file: int) -> str:
    return os.pread(file, 256, 0).decode(errors="replace")
