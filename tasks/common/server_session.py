"""Processes and ports of the servers that a run starts, and what a dead run left of them.

Each server leads a session of its own. While it runs, `logs/server-<kind>-<port>@<host>.json` names its processes by
pid and start time, and the process that owns it. A pid alone proves nothing, since the kernel hands it out
again; pid and start time together are one process and no other. Hosts may share the folder: each looks at its own alone.
"""

import glob
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.locks import opened, wait_alone

LOGS = Path("logs")
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Process:
    """One process, once and for all: `start_ticks` are clock ticks since boot (proc(5), stat, field 22)."""

    pid: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.start_ticks

    @classmethod
    def current(cls) -> "Process":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this pid now; start time 0, which no process has, if there is none."""
        stat = _stat(pid)
        return cls(pid, stat[1] if stat else 0)


@dataclass(frozen=True)
class ServerRecord:
    """What a later run needs to find a server again.

    Attributes:
        owner: the process that started the server and stops it; while it lives, nobody else may.
        processes: of the server's session, the leader first; its pid is the session's id.
    """

    kind: str
    port: int
    boot_id: str
    owner: Process
    processes: tuple[Process, ...]

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "ServerRecord":
        """
        Raises:
            DraftlineError: it is absent or damaged.
        """
        try:
            row = read_json(path)
            processes = tuple(Process(**process) for process in row["processes"])
            if not processes:
                raise IndexError("processes are empty")
            return cls(row["kind"], row["port"], row["boot_id"], Process(**row["owner"]), processes)
        except DraftlineError as error:
            damage = str(error)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            damage = f"{path}: {type(error).__name__} ({error})."
        raise DraftlineError(
            f"{damage} A record of a server is expected. If no run uses this folder and `pgrep -af sglang` shows no server of "
            f"one, remove the file."
        )


def record_path(kind: str, port: int, folder: Path = LOGS) -> Path:
    """Where the record of a server of this host lies."""
    return folder / f"server-{kind}-{port}@{socket.gethostname()}.json"


def boot_id() -> str:
    """Identity of this boot of the machine: pids and start ticks mean nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def session_processes(session: int) -> tuple[Process, ...]:
    """Living processes of a session, its leader first; zombies hold no memory and no port, so they are left out."""
    found = [Process(pid, stat[1]) for pid in _pids() if (stat := _stat(pid)) and stat[0] == session]
    return tuple(sorted(found, key=lambda process: process.pid != session))


def kill_session(session: int) -> None:
    """SIGKILL every process of a session until none is left.

    Raises:
        DraftlineError: some outlived it (stuck in the kernel, or another user's).
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while left := session_processes(session):
        if time.monotonic() > deadline:
            raise DraftlineError(
                f"processes {[process.pid for process in left]} of the server's session {session} are still there "
                f"{_KILL_TIMEOUT_S:.0f} s after SIGKILL. They may hold GPU memory: look at them with `ps -o pid,stat,wchan,args`."
            )
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def reap_stale_servers(folder: Path = LOGS) -> list[str]:
    """Kill the servers of this host whose owner is dead; leave everything that cannot be proven to be one of them.

    Returns:
        A sentence for each server killed.

    Raises:
        DraftlineError: a stale server cannot be killed.
    """
    reaped = []
    for path, record in _records(folder):
        if record.owner.is_alive:
            continue
        # While one recorded process lives in the session, the kernel gives its id to nobody else: all of it is ours.
        session = record.processes[0].pid
        survivors = set(session_processes(session)) & set(record.processes)
        if survivors:
            kill_session(session)
            reaped.append(
                f"killed a {record.kind} server that a dead run left on port {record.port} (session {session}, "
                f"{len(survivors)} processes)"
            )
        path.unlink(missing_ok=True)
    return reaped


def ports_of_others(folder: Path = LOGS) -> dict[int, Process]:
    """Ports of the servers of this host that another living process started, listening or not yet, and that process.

    Raises:
        DraftlineError: a record is damaged.
    """
    owners = {record.port: record.owner for _, record in _records(folder)}
    return {port: owner for port, owner in owners.items() if owner.is_alive and owner != Process.current()}


@contextmanager
def claiming(port: int, folder: Path) -> Iterator[None]:
    """Within the block no other run on this host starts a server; after it the record says whose the port is.

    Raises:
        DraftlineError: a living run has a server on the port, or the folder cannot be written.
    """
    with opened(folder / f"servers@{socket.gethostname()}.lock") as lock:
        wait_alone(lock, "Another server is being launched ({}); this one waits for it.")
        if owner := ports_of_others(folder).get(port):
            raise DraftlineError(
                f"port {port} is taken by another run that is still going, {describe_process(owner.pid)}. Wait until it has "
                f"ended, or set serve.port to another."
            )
        yield


def _records(folder: Path) -> Iterator[tuple[Path, ServerRecord]]:
    """Of this host since it booted: another boot may be another host of the same name."""
    for path in sorted(folder.glob(f"server-*@{glob.escape(socket.gethostname())}.json")):
        try:
            record = ServerRecord.read(path)
        except DraftlineError:
            if path.exists():
                raise
            continue  # another rank was faster
        if record.boot_id == boot_id():
            yield path, record


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGTERM, SIGHUP and Ctrl-C back until the block ends: a server started and not yet recorded must not be forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    arrived: list[int] = []
    held = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in held}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def port_owner(port: int) -> int | None:
    """Pid of the process that listens on a port; None where nobody does or the owner cannot be seen."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return connection.pid
    return None


def describe_process(pid: int | None) -> str:
    """'pid 812 (python -m http.server 30000)', as far as it can be seen."""
    if pid is None:
        return "a process that this user cannot see"
    words = command_line(pid)
    line = " ".join(" ".join(words).split())  # a word may hold whole lines
    return f"pid {pid} ({line if len(line) <= 200 else line[:199] + '…'})" if words else f"pid {pid}"


def command_line(pid: int) -> list[str]:
    """Words that a process was started with, empty where they cannot be seen."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
    return []


def working_folder(pid: int) -> Path | None:
    """Where a process's relative paths start; None where it cannot be seen."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cwd").readlink()
    return None


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> tuple[int, int] | None:
    """(session, start ticks) of a living process, None if it is gone or a zombie."""
    try:
        # The name, field 2, is in brackets and may itself hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    return int(fields[3]), int(fields[19])
