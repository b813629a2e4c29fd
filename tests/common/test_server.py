"""The life of a server process, with small scripts in the place of SGLang: only the lifecycle is under test."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.server import Server
from tasks.common.server_gpus import ServerGpus
from tasks.common.server_plan import ServerPlan
from tasks.common.server_session import (
    Process,
    ServerRecord,
    boot_id,
    reap_stale_servers,
    record_path,
    session_processes,
)
from tests.flows.processes import until
from tests.ports import free_port_pair


@dataclass(frozen=True)
class ScriptPlan(ServerPlan):
    """A plan that starts a Python script, with its port and its weight version for arguments."""

    script: str = ""

    def command(self, weight_version: str) -> list[str]:
        return [sys.executable, "-c", self.script, str(self.port), weight_version]


def scripted(
    script: str, folder: Path, timeout_s: int = 30, port: int | None = None, patience_s: float = 100
) -> Server:
    plan = ScriptPlan(
        "baseline",
        port or free_port_pair(),
        timeout_s,
        "cpu",
        "float32",
        Path("target"),
        None,
        None,
        flags=(),
        environment=(),
        script=script,
    )
    return Server(plan, folder, patience_s)


def stubborn(ready: Path) -> str:
    """A script that ignores SIGTERM, as its child does by inheritance; `ready` exists once it does."""
    return f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""


def answers(deed: str) -> str:
    """A script that passes for our server, and at the second question, which is no longer about its identity, does this."""
    return f"""
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, weight_version = int(sys.argv[1]), sys.argv[2]
meta = {{"finish_reason": {{"type": "length"}}, "prompt_tokens": 1, "cached_tokens": 0, "weight_version": weight_version}}
info = {{"model_path": "target", "speculative_algorithm": None, "speculative_draft_model_path": None, "dtype": "float32"}}
asked = []
class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(info)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        asked.append(self.path)
        if len(asked) > 1:
            {deed}
        self.answer({{"output_ids": [1], "text": "", "meta_info": meta}})
    def answer(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def test_a_port_in_use_is_refused_with_its_owner(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DraftlineError, match=f"port {port} is in use by pid {os.getpid()} .*python"):
            scripted("", tmp_path, port=port).launch()
    assert not list(tmp_path.glob("server-*.json"))


@pytest.fixture
def rivals(tmp_path):
    """Two real runs that start a server on one port at the same moment; nobody listens on it for as long as they live."""
    run = f"""
import sys, time
from pathlib import Path
from tasks.common.errors import DraftlineError
from tests.common.test_server import scripted
folder = Path({str(tmp_path)!r})
server = scripted("import time; print('first words', flush=True); time.sleep(60)", folder, port={free_port_pair()})
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.001)
try:
    server.launch()
    print("started", flush=True)
    sys.stdin.read()
except DraftlineError as error:
    print(error, flush=True)
finally:
    server.stop()
"""
    command = [sys.executable, "-c", run]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    runs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    yield runs
    for one in runs:
        one.kill()
        one.communicate()
    reap_stale_servers(tmp_path)


def test_of_two_runs_that_start_on_one_port_one_is_refused_and_leaves_the_other_alone(tmp_path, rivals):
    assert [one.stdout.readline() for one in rivals] == ["ready\n", "ready\n"]
    (tmp_path / "go").touch()
    said = [one.stdout.readline() for one in rivals]
    assert sum(line == "started\n" for line in said) == 1
    refused, winner = sorted(range(2), key=lambda number: said[number] == "started\n")
    assert f"is taken by another run that is still going, pid {rivals[winner].pid} (" in said[refused]
    assert "Wait until it has ended, or set serve.port to another." in said[refused]
    rivals[refused].wait()
    record, log = ServerRecord.read(*tmp_path.glob("server-*.json")), *tmp_path.glob("server-*.log")
    assert record.owner.pid == rivals[winner].pid
    until(lambda: log.read_text() == "first words\n")
    rivals[winner].communicate("")
    assert not record.processes[0].is_alive
    assert not list(tmp_path.glob("server-*.json"))


def test_a_run_does_not_touch_the_log_of_another_that_has_the_port_under_another_kind(tmp_path):
    server = scripted("", tmp_path)
    theirs = ServerRecord("speculative", server.plan.port, boot_id(), Process.of(os.getppid()), (Process.current(),))
    theirs.write(record_path("speculative", server.plan.port, tmp_path))
    server.log.write_text("of an earlier run")
    with pytest.raises(DraftlineError, match=rf"taken by another run .* pid {os.getppid()} "):
        server.launch()
    server.stop()
    assert server.log.read_text() == "of an earlier run"
    assert len(list(tmp_path.glob("server-*.json"))) == 1


def test_a_command_that_the_system_does_not_take_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(DraftlineError, match=r"cannot be started: Argument list too long\. .*serve\.extra_args"):
        scripted("#" * 2**18, tmp_path).launch()
    assert not list(tmp_path.glob("server-*.json"))


def test_a_dying_server_is_quoted_with_a_hint(tmp_path):
    script = "print('Load weight begin.'); raise ValueError('Model architectures [X] are not supported for now.')"
    with pytest.raises(DraftlineError) as failure, scripted(script, tmp_path):
        pass
    for part in (
        "died while",
        "exit code 1",
        "ValueError: Model architectures [X]",
        "does not serve the target's architecture",
    ):
        assert part in str(failure.value)


def test_a_server_that_says_it_is_lost_but_lingers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.common.server._DYING_S", 0.5)
    script = (
        "import time; print('Scheduler hit an exception: OutOfMemoryError: out of memory', flush=True); time.sleep(60)"
    )
    with pytest.raises(DraftlineError, match=r"(?s)died while .*It ran out of memory"), scripted(script, tmp_path):
        pass


def test_a_traceback_that_sglang_survives_is_no_reason_to_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.common.server._DYING_S", 0.2)
    script = "import time; print('Traceback (most recent call last):\\nConnectionError: x', flush=True); time.sleep(60)"
    with pytest.raises(DraftlineError, match="was not ready after 2 s"), scripted(script, tmp_path, timeout_s=2):
        pass


def test_a_server_that_ignores_sigterm_is_gone_with_its_children_in_five_seconds(tmp_path):
    server = scripted(stubborn(tmp_path / "ready"), tmp_path)
    server.launch()
    session = server._process.pid
    try:
        until((tmp_path / "ready").exists)
        assert len(session_processes(session)) == 2
    finally:
        began = time.monotonic()
        server.stop()
    assert time.monotonic() - began < 5
    assert session_processes(session) == ()
    assert not list(tmp_path.glob("server-*.json"))


def test_a_stage_that_gets_sigterm_takes_its_starting_server_along(tmp_path):
    stage = f"""
import signal, sys
from pathlib import Path
from tests.common.test_server import scripted, stubborn
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
folder = Path({str(tmp_path)!r})
with scripted(stubborn(folder / "ready"), folder, timeout_s=60):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", stage], cwd=Path(__file__).parents[2])
    try:
        until((tmp_path / "ready").exists)
        leader = ServerRecord.read(*tmp_path.glob("server-*.json")).processes[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert not leader.is_alive
        assert session_processes(leader.pid) == ()
    finally:
        process.kill()
        process.wait()
        reap_stale_servers(tmp_path)


def test_a_signal_in_the_very_moment_of_the_start_leaves_nothing_behind(tmp_path, monkeypatch):
    started = []

    def interrupted(*args, **kwargs):
        started.append(subprocess.Popen(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return started[0]

    server = scripted("import time; time.sleep(60)", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.common.server.subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": interrupted}))
        with pytest.raises(KeyboardInterrupt), server:
            pass
    assert session_processes(started[0].pid) == ()
    assert not list(tmp_path.glob("server-*.json"))


def test_another_server_on_the_port_does_not_pass_for_ours(tmp_path, stranger):
    server = scripted("import time; time.sleep(60)", tmp_path, port=stranger)
    server.weight_version = "draftline-ours"
    with pytest.raises(DraftlineError, match=r"answers say 'stale', the plan 'draftline-ours': another server"):
        server._prove_identity()


@pytest.fixture
def stranger():
    """The port of an old server that still holds it and answers everything."""
    import json
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    meta = {"finish_reason": {"type": "length"}, "prompt_tokens": 1, "cached_tokens": 0, "weight_version": "stale"}

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.dumps({"output_ids": [1], "text": "", "meta_info": meta}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd.server_port
    httpd.shutdown()
    httpd.server_close()


def test_a_start_that_is_killed_leaves_a_record_that_names_it(tmp_path):
    server = scripted("import time; time.sleep(60)", tmp_path)
    server.launch()
    record = ServerRecord.read(record_path("baseline", server.plan.port, tmp_path))
    assert record.owner == Process.current()
    assert record.processes[0] == Process.of(server._process.pid)
    server.stop()


def test_what_makes_a_ready_server_slow_is_told(tmp_path, capfd):
    captured = "print('[2026-12-01 02:59:15] Capture target verify CUDA graph begin. backend=full', flush=True)\n"
    with scripted(captured + answers("pass"), tmp_path):
        assert "--speculative-draft-attention-backend triton" in capfd.readouterr().err


def test_a_server_that_dies_in_use_is_told_with_its_exit_code_and_its_log(tmp_path):
    """It lets go of its port and its connections a little before it is dead."""
    deed = (
        "print('OSError: [Errno 28] No space left on device', flush=True); self.server.socket.shutdown(2); "
        "self.connection.shutdown(2); time.sleep(1); os._exit(3)"
    )
    with scripted(answers(deed), tmp_path) as server:
        with pytest.raises(
            DraftlineError, match=r"(?s)/generate: no answer: .*\(exit code 3\):\n.*No space left on device"
        ):
            server.generate([1], {})
        with pytest.raises(DraftlineError, match=r"the baseline server died\.\n.*exit code 3"):
            server.require_alive()


def test_a_server_that_is_stopped_fails_the_requests_in_flight_with_the_reason(tmp_path):
    with scripted(answers("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"), tmp_path, patience_s=1) as server:
        with pytest.raises(
            DraftlineError, match=r"(?s)/generate: no answer: .*The server hangs: .*Stopped \(state T\): \S+ \(pid"
        ):
            server.generate([1], {})
        assert "for memory" not in server._diagnosis()  # it was ended by the watch, not by the kernel
    assert not list(tmp_path.glob("server-*.json"))


def test_a_server_that_never_had_the_port_does_not_complain_of_who_has_it(tmp_path, stranger, monkeypatch):
    monkeypatch.setattr("tasks.common.server.port_is_free", lambda _: True)
    server = scripted("import time; time.sleep(60)", tmp_path, port=stranger)
    server.launch()
    monkeypatch.undo()
    server.stop()


def test_a_gpu_is_shared_with_servers_of_this_process_while_they_run(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tasks.common.server_gpus._RELEASE_S", 0)
    monkeypatch.setattr("tasks.common.gpu.holders", dict)
    first, second, third = (scripted("import time; time.sleep(60)", tmp_path) for _ in range(3))
    for server in (first, second, third):
        server._gpus = ServerGpus(replace(server.plan, device="cuda"))
    try:
        for server, mib in ((first, 4), (second, 9000)):
            monkeypatch.setattr("tasks.common.gpu.memory_used_mib", lambda mib=mib: {0: mib})
            server.launch()
        first.stop()
        second.stop()
        with pytest.raises(DraftlineError, match="GPU 0 is not idle"):
            third.launch()
    finally:
        for server in (first, second, third):
            server.stop()
