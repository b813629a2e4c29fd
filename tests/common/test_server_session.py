"""What a dead run left is killed; what merely looks like it is left alone."""

import os
import signal
import subprocess
import sys

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.server_session import (
    Process,
    ServerRecord,
    boot_id,
    kill_session,
    ports_of_others,
    reap_stale_servers,
    record_path,
    session_processes,
)
from tests.flows.processes import until

DEAD = Process(pid=2**22 - 1, start_ticks=1)


@pytest.fixture
def orphan():
    """A process that leads a session of its own, with a child in it, as a server does."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        until(lambda: len(session_processes(process.pid)) == 2)
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def plant(folder, processes, owner=DEAD, boot=None):
    record_path("baseline", 31202, folder).parent.mkdir(exist_ok=True)
    ServerRecord("baseline", 31202, boot or boot_id(), owner, processes).write(record_path("baseline", 31202, folder))


def test_a_server_whose_owner_is_dead_is_killed_with_its_whole_session(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid)[:1])
    (sentence,) = reap_stale_servers(tmp_path)
    assert "port 31202" in sentence
    assert session_processes(orphan.pid) == ()
    assert list(tmp_path.glob("server-*.json")) == []


def test_a_child_that_outlived_the_leader_is_killed(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid))
    os.kill(orphan.pid, signal.SIGKILL)
    orphan.wait()
    assert len(session_processes(orphan.pid)) == 1
    reap_stale_servers(tmp_path)
    assert session_processes(orphan.pid) == ()


def test_a_process_that_only_has_the_same_pid_is_left_alone(tmp_path, orphan):
    leader = Process.of(orphan.pid)
    plant(tmp_path, (Process(leader.pid, leader.start_ticks - 1),))
    assert reap_stale_servers(tmp_path) == []
    assert leader.is_alive


def test_a_record_that_another_rank_has_removed_meanwhile_is_none(tmp_path, orphan, monkeypatch):
    plant(tmp_path, session_processes(orphan.pid))
    real = ServerRecord.read
    monkeypatch.setattr(ServerRecord, "read", lambda path: (path.unlink(), real(path))[1])
    assert reap_stale_servers(tmp_path) == []


def test_a_pid_of_another_boot_is_left_alone(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid), boot="another boot")
    assert reap_stale_servers(tmp_path) == []
    assert Process.of(orphan.pid).is_alive


def test_a_record_of_another_host_that_shares_the_folder_is_left_alone(tmp_path, orphan, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "neighbour")
    plant(tmp_path, session_processes(orphan.pid))
    theirs = record_path("baseline", 31202, tmp_path)
    monkeypatch.undo()
    assert reap_stale_servers(tmp_path) == []
    assert theirs.exists()
    assert theirs != record_path("baseline", 31202, tmp_path)
    assert Process.of(orphan.pid).is_alive


def test_a_record_of_another_boot_is_kept(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid), boot="another boot")
    reap_stale_servers(tmp_path)
    assert record_path("baseline", 31202, tmp_path).exists()


def test_a_server_whose_owner_lives_is_left_alone(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid), owner=Process.current())
    assert reap_stale_servers(tmp_path) == []
    assert Process.of(orphan.pid).is_alive
    assert record_path("baseline", 31202, tmp_path).exists()


def test_an_owner_whose_pid_was_given_to_another_process_is_dead(tmp_path, orphan):
    this = Process.current()
    plant(tmp_path, session_processes(orphan.pid), owner=Process(this.pid, this.start_ticks - 1))
    assert len(reap_stale_servers(tmp_path)) == 1


def test_a_port_belongs_to_a_run_that_lives_whether_its_server_listens_or_not(tmp_path, orphan):
    plant(tmp_path, session_processes(orphan.pid), owner=Process.of(orphan.pid))
    assert ports_of_others(tmp_path) == {31202: Process.of(orphan.pid)}
    plant(tmp_path, session_processes(orphan.pid), owner=Process.current())
    assert ports_of_others(tmp_path) == {}
    plant(tmp_path, session_processes(orphan.pid), owner=DEAD)
    assert ports_of_others(tmp_path) == {}


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        "null",
        '{"kind": "baseline"}',
        '{"processes": [], "owner": {"pid": 1}}',
        '{"processes": 1}',
        '{"kind": "baseline", "port": 31202, "boot_id": "", "owner": {"pid": 1, "start_ticks": 1}, "processes": []}',
        "[" * 9999,
    ],
)
def test_a_damaged_record_is_named_with_what_to_do(tmp_path, damaged):
    path = record_path("baseline", 31202, tmp_path)
    path.write_text(damaged)
    with pytest.raises(DraftlineError, match=rf"{path.name}: .*A record of a server is expected.* remove the file"):
        reap_stale_servers(tmp_path)
    assert path.exists()


def test_a_zombie_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", ""])
    born = Process.of(process.pid)
    until(lambda: not born.is_alive)
    process.wait()


def test_a_start_behind_another_runs_says_whom_it_waits_for_and_goes_on(tmp_path):
    claim = "import pathlib, sys; from tasks.common.server_session import claiming\nwith claiming(31203, pathlib.Path(sys.argv[1])): "
    words = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(
        [sys.executable, "-c", claim + "print('in', flush=True); sys.stdin.read()", str(tmp_path)], **words
    )
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen([sys.executable, "-c", claim + "print('in')", str(tmp_path)], **words)
    assert second.stderr.readline().startswith(f"Another server is being launched (pid {first.pid} on ")
    first.communicate("")
    assert second.communicate() == ("in\n", "")
