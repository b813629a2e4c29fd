"""Watching a server in use: one that hangs is ended, so that nobody waits for its answers for an hour.

    watch = HangWatch(url, session, patience_s=100)
    watch.start()
    with watch.waiting():  # a request is in flight
        ...
    watch.end()

SGLang's /health answers at the first sign of the scheduler: where it computes, the end of its next batch, else a token
made for the purpose. It is asked only while a request has waited for long: at any other time that token would stand in
the traces of hooks, keep /flush_cache from its work, or take the GPU from the server that is measured.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tasks.common.errors import DraftlineError
from tasks.common.server_session import kill_session, session_processes

# Unanswered checks in a row after which a server hangs. One that computes all the while gets longer than SGLang's own
# watchdog takes to end a pass (300 to 450 s): on a CPU a long prompt takes minutes.
_CHECKS, _CHECKS_COMPUTING = 4, 30
_COMPUTES = 0.1  # seconds of processor time per second; on a crowded machine a busy server gets no more


@dataclass(frozen=True)
class _State:
    """One process of the server, as the kernel sees it."""

    pid: int
    name: str
    status: str
    processor_s: float


class HangWatch:
    """Ends the session of a server that gives no sign of life while a request waits.

    Attributes:
        verdict: why it was ended; empty as long as it was not.
    """

    def __init__(self, url: str, session: int, patience_s: float):
        """
        Args:
            session: id of the server's session.
            patience_s: how long a request waits without a sign of a server that does not even compute.
        """
        self.verdict = ""
        self._url, self._session = url, session
        self._interval_s = patience_s / (_CHECKS + 1)
        self._began: dict[object, float] = {}  # time.monotonic() of each request in flight
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block somebody waits for an answer."""
        request = object()
        self._began[request] = time.monotonic()
        try:
            yield
        finally:
            del self._began[request]

    def end(self) -> None:
        """Judge no more: called before the server is stopped."""
        self._ended.set()

    def join(self) -> None:
        """Wait for the thread; a check that is under way ends with the server."""
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._someone_waits_long():
                self._check()

    def _check(self) -> None:
        """Ask until there is a sign, nobody waits any more, or patience is at an end."""
        began, before = time.monotonic(), _processor_s(self._states())
        for number in range(1, _CHECKS_COMPUTING + 1):
            if self._gives_a_sign(until=began + number * self._interval_s):
                return
            states = self._states()
            if self._ended.is_set() or not self._someone_waits_long() or not states:
                return  # it is being stopped or has died, and whoever waits is told that
            silent_s, used_s = time.monotonic() - began, _processor_s(states) - before
            # A stopped rank leaves the others of its group spinning.
            computes = used_s > _COMPUTES * silent_s and not any(state.status == "stopped" for state in states)
            if number >= (_CHECKS_COMPUTING if computes else _CHECKS):
                self._give_up(states, silent_s, used_s)
                return

    def _someone_waits_long(self) -> bool:
        return time.monotonic() - min(self._began.copy().values(), default=float("inf")) > self._interval_s

    def _gives_a_sign(self, until: float) -> bool:
        """Ask once; a refusal is slept on until the moment `until`."""
        import requests

        with suppress(requests.RequestException), requests.Session() as http:
            http.trust_env = False  # as the client's
            if http.get(f"{self._url}/health", timeout=max(0.1, until - time.monotonic())).ok:
                return True
        self._ended.wait(max(0.0, until - time.monotonic()))
        return False

    def _states(self) -> list[_State]:
        import psutil

        states = []
        for member in session_processes(self._session):
            with suppress(psutil.Error):
                process = psutil.Process(member.pid)
                with process.oneshot():
                    times = process.cpu_times()
                    states.append(_State(process.pid, process.name(), process.status(), times.user + times.system))
        return states

    def _give_up(self, states: list[_State], silent_s: float, used_s: float) -> None:
        stopped = [f"{state.name} (pid {state.pid})" for state in states if state.status == "stopped"]
        if stopped:
            why = (
                f"Stopped (state T): {', '.join(stopped)}. Something has stopped it: a SIGSTOP, a debugger, a frozen container. "
                f"Find out what, then start again."
            )
        else:
            listed = ", ".join(f"{state.name} (pid {state.pid}) {state.status}" for state in states)
            why = (
                f"Its processes: {listed}. The end of its log says what it did last; `py-spy dump --pid PID` of the next one "
                f"shows where it waits."
            )
        self.verdict = (
            f"The server hangs: a request waits, and for {silent_s:.0f} s there was no answer on /health, in which its processes "
            f"computed for {used_s:.1f} s. {why} It was ended, with all its processes."
        )
        try:
            kill_session(self._session)
        except DraftlineError as error:
            self.verdict += f" {error}"


def _processor_s(states: list[_State]) -> float:
    return sum(state.processor_s for state in states)
