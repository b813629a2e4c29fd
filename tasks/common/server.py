"""A real SGLang server as a context manager: started, proven to be ours, used, and gone when the block ends.

    with Server(baseline_plan(params)) as server:
        completion = server.generate(token_ids, {"temperature": 0, "max_new_tokens": 64})

The server leads its own session, writes to its own log, `logs/server-<kind>-<port>@<host>.log`, and is recorded beside
it so that the next run finds what a killed one left.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tasks.common.check import require_no_errors
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.identity import Listener, check_nonce, check_serves
from tasks.common.server_gpus import ServerGpus
from tasks.common.server_log import LogReader, explain
from tasks.common.server_plan import ServerPlan, process_environment
from tasks.common.server_session import (
    LOGS,
    Process,
    ServerRecord,
    boot_id,
    claiming,
    describe_process,
    kill_session,
    port_is_free,
    port_owner,
    reap_stale_servers,
    record_path,
    session_processes,
    signals_held,
)
from tasks.common.server_watch import HangWatch
from tasks.common.sglang_client import SGLangClient

# SGLang notices SIGTERM only every 5 s, and a stage must be gone within 5: it gets a moment, then SIGKILL.
_GRACE_S = 0.5
_POLL_S = 0.25
_HEARTBEAT_S = 10.0
_DYING_S = 5.0
_PORT_RELEASE_S = 10.0
_CLOSING_S, _EXIT_S = 1.0, 5.0
# A request that waits for so long without a sign of the server waits for one that hangs. SGLang itself calls its
# scheduler unhealthy after 20 s.
_PATIENCE_S = 100.0


class Server(SGLangClient):
    """A client of a server that it starts and stops itself."""

    def __init__(self, plan: ServerPlan, folder: Path = LOGS, patience_s: float = _PATIENCE_S):
        super().__init__(f"http://127.0.0.1:{plan.port}")
        self.plan = plan
        self.weight_version = f"draftline-{secrets.token_hex(8)}"
        self._folder = folder
        self._record = record_path(plan.kind, plan.port, folder)
        self.log = self._record.with_suffix(".log")
        self._recorded: ServerRecord | None = None
        self._process: subprocess.Popen | None = None
        self._launched_at = 0.0
        self._is_proven = False
        self._patience_s = patience_s
        self._watch: HangWatch | None = None
        self._gpus = ServerGpus(plan)

    def __enter__(self) -> "Server":
        try:
            self.launch()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the process; returns at once.

        Raises:
            DraftlineError: another run has the port, somebody listens on it, a GPU of the plan is not idle, or the system
                does not take the command.
        """
        with claiming(self.plan.port, self._folder):
            for sentence in reap_stale_servers(self._folder):
                _say(sentence)
            self._require_free_port()
            self._gpus.require_idle()
            self._launched_at = time.monotonic()
            with self._open_log() as log, signals_held():
                self._process = self._start(log)
                self._write_record()
                self._gpus.started()
        self._watch = HangWatch(self.url, self._process.pid, self._patience_s)

    def _require_free_port(self) -> None:
        deadline = time.monotonic() + _PORT_RELEASE_S
        # Of a server that was just killed the kernel closes the socket a little later, when nobody owns it any more.
        while not port_is_free(self.plan.port) and port_owner(self.plan.port) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if not port_is_free(self.plan.port):
            owner = describe_process(port_owner(self.plan.port))
            raise DraftlineError(
                f"port {self.plan.port} is in use by {owner}. It would answer in place of our server. Stop it, or set "
                f"serve.port to a free port."
            )

    def _start(self, log: BinaryIO) -> subprocess.Popen:
        try:
            return subprocess.Popen(
                self.plan.command(self.weight_version),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=process_environment(self.plan.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise DraftlineError(
                f"the {self.plan.kind} server cannot be started: {error.strerror}. If that is too long, shorten serve.extra_args "
                f"or serve.environment."
            ) from None

    def _open_log(self) -> BinaryIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self.log.open("wb")
        except OSError as error:
            raise DraftlineError(f"{self.log}: cannot be written: {error.strerror}.") from None

    def wait_until_ready(self) -> None:
        """Wait for health, saying how far the start is; then prove that it is this server that answers.

        Raises:
            DraftlineError: the process died, its log says that it is lost, it took longer than
                serve.startup_timeout_s, or another server answers.
        """
        log, said, spoke_at, lost_at = LogReader(self.log), "", 0.0, None
        try:
            while not self.is_healthy():
                now = time.monotonic()
                log.read_on()
                self._write_record()
                if log.phase != said or now - spoke_at > _HEARTBEAT_S:
                    said, spoke_at = log.phase, now
                    _say(f"{self.plan.kind} server: {said} ({now - self._launched_at:.0f} s)")
                if log.is_lost:
                    lost_at = lost_at or now
                if self._process.poll() is not None or (lost_at and now - lost_at > _DYING_S):
                    raise DraftlineError(f"the {self.plan.kind} server died while {said}.{self._diagnosis()}")
                if now - self._launched_at > self.plan.startup_timeout_s:
                    raise DraftlineError(
                        f"the {self.plan.kind} server was not ready after {self.plan.startup_timeout_s} s, still {said}. "
                        f"Raise serve.startup_timeout_s if it only needs longer.{self._diagnosis()}"
                    )
                time.sleep(_POLL_S)
            log.read_on()
        finally:
            log.close()
        self._write_record()
        self._gpus.ready()
        self._watch.start()
        self._prove_identity()
        self._is_proven = True
        _say(f"{self.plan.kind} server: ready on port {self.plan.port} ({time.monotonic() - self._launched_at:.0f} s)")
        if log.warning:
            _say(f"{self.plan.kind} server: {log.warning}")

    def stop(self) -> None:
        """End the whole session, and prove that nothing of it is left.

        Raises:
            DraftlineError: a process, the port or GPU memory is still held.
        """
        if self._process is None:
            return
        process, watch = self._process, self._watch
        if watch:
            watch.end()
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            kill_session(process.pid)
        process.wait()
        if watch:
            watch.join()
        self._process = None
        self._record.unlink(missing_ok=True)
        self._gpus.ended()
        # One that never had the port has nothing to give back: whoever holds it is why the start failed.
        if self._is_proven and not port_is_free(self.plan.port):
            owner = describe_process(port_owner(self.plan.port))
            raise DraftlineError(f"port {self.plan.port} is still in use after the server was stopped, by {owner}.")
        self._prove_gpu_memory_is_back()

    def require_alive(self) -> None:
        """
        Raises:
            DraftlineError: its process has ended; quotes its log.
        """
        if self._process is None or self._process.poll() is not None:
            raise DraftlineError(f"the {self.plan.kind} server died.{self._diagnosis()}")

    @contextmanager
    def _explained(self, *args: Any) -> Iterator[None]:
        """Within the block an answer is waited for: a server that hangs is ended, and the connection with it."""
        with super()._explained(*args), self.waiting():
            yield

    def waiting(self) -> AbstractContextManager[None]:
        """Within the block somebody else waits for the server: if it hangs it is ended."""
        return self._watch.waiting() if self._watch else nullcontext()

    def _prove_identity(self) -> None:
        """A health check may be answered by an old server that still holds the port (failure mode S1)."""
        listener, answered = Listener.of(self.url), self.generate([0], {"max_new_tokens": 1, "temperature": 0})
        require_no_errors([check_nonce(answered.weight_version, self.weight_version, listener)])
        if listener.pid is not None and listener.pid not in {process.pid for process in self._session()}:
            raise DraftlineError(
                f"port {self.plan.port} belongs to {describe_process(listener.pid)}, not to the server started here."
            )
        expected = {
            "model_path": str(self.plan.target),
            "speculative_algorithm": self.plan.algorithm,
            "speculative_draft_model_path": str(self.plan.draft) if self.plan.draft else None,
            "dtype": self.plan.dtype,
        }
        require_no_errors([check_serves(self.server_info(), expected, listener)])

    def _prove_gpu_memory_is_back(self) -> None:
        self._gpus.prove_given_back()

    def _session(self) -> tuple[Process, ...]:
        return session_processes(self._process.pid) if self._process else ()

    def _write_record(self) -> None:
        processes = self._session() or (Process.of(self._process.pid),)
        record = ServerRecord(self.plan.kind, self.plan.port, boot_id(), Process.current(), processes)
        if record != self._recorded:
            record.write(self._record)
            self._recorded = record

    def _diagnosis(self) -> str:
        exit_code, verdict = self._exit_code(), self._watch.verdict if self._watch else ""
        log = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        running = "it still runs" if self._process else "stopped"
        state = running if exit_code is None else f"exit code {exit_code}"
        why = f"\n{verdict}" if verdict else ""
        return f"{why}\n{self.log} ({state}):\n{explain(log, None if verdict else exit_code)}"

    def _exit_code(self) -> int | None:
        """None while it runs. One that is ending lets go of its connections first, then of its port: it is given that moment."""
        asked_at = time.monotonic()
        while self._process and (exit_code := self._process.poll()) is None:
            patience = _EXIT_S if port_is_free(self.plan.port) else _CLOSING_S
            if not self._is_proven or time.monotonic() - asked_at > patience:
                return None
            time.sleep(0.05)
        return exit_code if self._process else None


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Several servers at once.

    They start side by side, but in turn where a server takes as much cache as it finds memory free for: two that look at the same
    moment would find it twice.
    """
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.launch()
            if not server.plan.bounds_its_cache:
                server.wait_until_ready()
        for server in servers:
            if server.plan.bounds_its_cache:
                server.wait_until_ready()
        yield


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
