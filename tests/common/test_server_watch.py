"""A server that hangs is ended while somebody waits, and no other; small scripts in the place of SGLang."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.common.server_session import kill_session, port_is_free, session_processes
from tasks.common.server_watch import HangWatch
from tests.flows.processes import until
from tests.ports import free_port_pair

_HEALTHY = """
import pathlib, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        pathlib.Path(sys.argv[2]).touch()
        self.send_response(200)
        self.end_headers()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
_SICK = _HEALTHY.replace("200", "503")
# They listen, and never answer.
_DEAF = """
import socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
"""
_SLEEPS = _DEAF + "time.sleep(600)"
_COMPUTES = _DEAF + "while True: pass"
_COMPUTES_BESIDE_A_CHILD = (
    f"{_DEAF}subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nwhile True: pass"
)
PATIENCE_S = 1.0


class Watched:
    """A script that leads a session, as a server does, and its watch."""

    def __init__(self, script: str, asked: Path):
        """
        Args:
            asked: a file that is there once somebody asked for its health.
        """
        port, self.asked = free_port_pair(), asked
        self.process = subprocess.Popen([sys.executable, "-c", script, str(port), str(asked)], start_new_session=True)
        until(lambda: not port_is_free(port), every=0.02)
        self.watch = HangWatch(f"http://127.0.0.1:{port}", self.process.pid, PATIENCE_S)
        self.watch.start()

    @property
    def is_gone(self) -> bool:
        return session_processes(self.process.pid) == ()


@pytest.fixture
def watched(tmp_path) -> Iterator[Callable[[str], Watched]]:
    made: list[Watched] = []

    def make(script: str) -> Watched:
        made.append(Watched(script, tmp_path / "asked"))
        return made[-1]

    yield make
    for server in made:
        server.watch.end()
        kill_session(server.process.pid)
        server.process.wait()
        server.watch.join()


def test_a_server_that_is_stopped_while_a_request_waits_is_ended_and_named(watched):
    server = watched(_HEALTHY)
    with server.watch.waiting():
        server.process.send_signal(signal.SIGSTOP)
        until(lambda: server.is_gone, every=0.02)
    assert re.search(rf"Stopped \(state T\): \S+ \(pid {server.process.pid}\)", server.watch.verdict)
    assert "start again" in server.watch.verdict


def test_a_server_that_only_sleeps_is_ended_with_the_states_of_its_processes(watched):
    server = watched(_SLEEPS)
    with server.watch.waiting():
        until(lambda: server.is_gone, every=0.02)
    assert f"(pid {server.process.pid}) sleeping" in server.watch.verdict
    assert "py-spy dump" in server.watch.verdict


def test_a_server_that_answers_its_health_check_may_take_as_long_as_it_likes(watched):
    server = watched(_HEALTHY)
    with server.watch.waiting():
        server.watch._ended.wait(4 * PATIENCE_S)
    assert server.asked.exists()
    assert not server.is_gone
    assert server.watch.verdict == ""


def test_a_server_that_computes_is_given_more_time_and_not_for_ever(watched, monkeypatch):
    """On a CPU a long prompt takes minutes, in which the scheduler gives no sign."""
    server = watched(_COMPUTES)
    with server.watch.waiting():
        server.watch._ended.wait(3 * PATIENCE_S)
        assert not server.is_gone
        monkeypatch.setattr("tasks.common.server_watch._CHECKS_COMPUTING", 5)
    server.watch.end()
    again = HangWatch(server.watch._url, server.process.pid, PATIENCE_S)
    again.start()
    with again.waiting():
        until(lambda: server.is_gone, every=0.02)
    assert "The server hangs" in again.verdict


def test_a_stopped_process_of_a_group_whose_others_spin_is_found(watched, monkeypatch):
    """Ranks of a tensor-parallel server wait for each other with all their might."""
    monkeypatch.setattr("tasks.common.server_watch._CHECKS_COMPUTING", 10**6)
    server = watched(_COMPUTES_BESIDE_A_CHILD)
    children = [p.pid for p in until(lambda: session_processes(server.process.pid)[1:])]
    with server.watch.waiting():
        os.kill(children[0], signal.SIGSTOP)
        until(lambda: server.is_gone, every=0.02)
    assert f"(pid {children[0]})" in server.watch.verdict
    assert f"(pid {server.process.pid})" not in server.watch.verdict


def test_a_server_that_says_itself_that_it_is_sick_is_ended(watched):
    """SGLang answers 503 after 20 s without a sign of its scheduler."""
    server = watched(_SICK)
    with server.watch.waiting():
        until(lambda: server.is_gone, every=0.02)
    assert "The server hangs" in server.watch.verdict


def test_health_is_asked_for_only_while_somebody_waits_long(watched):
    """A health check is a request: it would stand in traces, and keep the cache from being flushed."""
    server = watched(_HEALTHY)
    for _ in range(20):
        with server.watch.waiting():
            server.watch._ended.wait(PATIENCE_S / 10)
    assert not server.asked.exists()


def test_a_watch_that_has_ended_ends_nobody(watched):
    server = watched(_SLEEPS)
    with server.watch.waiting():
        server.watch._ended.wait(PATIENCE_S / 2)
        server.watch.end()
        server.watch.join()
    assert not server.watch._thread.is_alive()
    assert not server.is_gone
    assert server.watch.verdict == ""


def test_a_server_that_died_is_not_said_to_hang(watched):
    server = watched(_SLEEPS)
    with server.watch.waiting():
        kill_session(server.process.pid)
        server.watch._ended.wait(2 * PATIENCE_S)
    assert server.watch.verdict == ""
