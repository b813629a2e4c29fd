"""Checks of ports, interpreters, packages, the repository and prompts, against real ones."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.server_session import Process, ServerRecord, boot_id, record_path
from tasks.verify_environment.checks.host import (
    check_constraints,
    check_interpreter,
    check_packages,
    check_ports,
    check_prompts,
    check_repository,
)
from tasks.verify_environment.facts import Interpreter, Package, Repository
from tasks.verify_environment.probes.interpreter import find as describe_interpreter
from tasks.verify_environment.probes.run import Probe, run_probes
from tasks.verify_environment.prompt_sources import count_prompts, prompts_and_tokens
from tests.ports import free_port_pair

ROOT = Path(__file__).parents[2]


@contextmanager
def listening():
    """A socket that listens on a free port whose successor is free too."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", free_port_pair()))
        taken.listen()
        yield taken.getsockname()[1]


def serving_on(port: int) -> Params:
    return Params.model_validate({"serve": {"port": port}})


def ours() -> Interpreter:
    return Interpreter.model_validate(describe_interpreter())


def test_free_ports_are_ok():
    with listening() as port:
        pass
    check = check_ports(serving_on(port))
    assert check.verdict == "ok" and check.found == "all 2 free"


@pytest.mark.parametrize("offset", [0, 1])
def test_a_taken_port_is_an_error_that_names_its_owner(offset):
    with listening() as port:
        check = check_ports(serving_on(port - offset))
    assert check.verdict == "error"
    assert f"{port} held by pid {os.getpid()}" in check.found
    assert f"kill {os.getpid()}" in check.fix


def test_a_port_for_each_of_the_other_drafts_is_looked_at(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        last = taken.getsockname()[1]
        sections = {"serve": {"port": last - 3}, "benchmark": {"drafts": {"theirs": "a", "others": "b"}}}
        check = check_ports(Params.model_validate(sections))
    assert check.verdict == "error" and f"{last} held by pid {os.getpid()}" in check.found


def test_a_server_that_a_dead_run_left_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with listening() as port:
        pass
    program = (
        f"import socket, time\ns = socket.create_server(('127.0.0.1', {port}))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "up\n"
        record = ServerRecord("speculative", port, boot_id(), Process(2**22 + 1, 1), (Process.of(server.pid),))
        record.write(record_path("speculative", port))
        assert check_ports(serving_on(port)).verdict == "warning"
        ServerRecord("speculative", port, boot_id(), Process.current(), record.processes).write(
            record_path("speculative", port)
        )
        assert check_ports(serving_on(port)).verdict == "error"
    finally:
        server.kill()
        server.wait()


def test_python_on_path_that_is_this_one_is_ok():
    assert check_interpreter(ours(), ours()).verdict == "ok"


def test_another_python_on_path_is_an_error_with_the_command_that_cures_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/other/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    on_path = Interpreter.model_validate(run_probes(Probe("interpreter", python="python"))["interpreter"])
    check = check_interpreter(ours(), on_path)
    assert check.verdict == "error"
    assert "without torch, transformers, sglang, mlflow, prefect, dvc, great_expectations" in check.found
    assert check.fix == f'export PATH="{Path(sys.executable).parent}:$PATH"'


def test_a_python_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "python").write_text("#!/bin/sh\necho 'pyenv: python: command not found' >&2\nexit 127\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    on_path = Interpreter.model_validate(run_probes(Probe("interpreter", python="python"))["interpreter"])
    check = check_interpreter(ours(), on_path)
    assert check.verdict == "error"
    assert check.found == "exit status 127: pyenv: python: command not found"


def test_a_package_that_is_missing_here_is_an_error():
    here = ours().model_copy(update={"packages": {"sglang": Package(version=None, locations=())}})
    assert "lacks sglang" in check_interpreter(here, here).found


def test_a_second_copy_is_a_warning_that_says_which_comes_first():
    copies = {"transformers": Package(version="5.19.0", locations=("/opt/site/transformers", "/venv/transformers"))}
    check = check_packages(ours().model_copy(update={"packages": copies}))
    assert check.verdict == "warning"
    assert check.found == "transformers: /opt/site/transformers before /venv/transformers"
    assert check_packages(ours()).verdict == "ok"


def test_versions_other_than_the_pinned_are_warnings_that_name_them(tmp_path):
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==1.0.0\npydantic==2.14.4\nno-such-package==3\n")
    check = check_constraints(Params(), pins)
    assert check.verdict == "warning"
    assert "(pinned 1.0.0)" in check.found
    assert "no-such-package absent (pinned 3)" in check.found
    assert "pydantic" not in check.found


def test_pins_are_for_cpu_only():
    on_gpu = Params.model_validate({"target": {"device": "cuda"}})
    assert check_constraints(on_gpu).verdict == "not applicable"


def test_a_local_version_label_is_the_same_version(tmp_path):
    pins = tmp_path / "constraints.txt"
    pins.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    assert check_constraints(Params(), pins).verdict == "ok"


def test_a_folder_that_is_no_repository_of_git_and_dvc_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sound = Repository(version="3.67.1", cache="/c", link="copy")
    assert "not a git repository" in check_repository(sound).found
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert check_repository(sound).verdict == "ok"
    assert "no .dvc here" in check_repository(Repository(version="3.67.1")).found
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    refused = check_repository(sound)  # the gate on the benchmark would end at this, after everything
    assert (refused.verdict, "dubious ownership" in refused.found) == ("warning", True)


@pytest.fixture
def prompts(tmp_path):
    def count(rows: dict[str, list[dict]], **section):
        for name, contents in rows.items():
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in contents))
        return count_prompts(Params.model_validate({"prompts": {"folder": str(tmp_path), **section}}).prompts)

    return count


def test_prompts_are_counted_by_split_whatever_their_form(prompts):
    sources = prompts(
        {
            "chat.jsonl": [
                {"messages": [{"role": "user", "content": "x" * 390}]},
                {"conversations": [{"from": "human", "value": "x" * 390}], "split": "heldout"},
            ],
            "heldout-maths.jsonl": [{"prompt": "x" * 39_000}],
        }
    )
    assert prompts_and_tokens(sources, "train", None) == (1, 130)
    assert prompts_and_tokens(sources, "heldout", None) == (2, 130 + 512)
    assert prompts_and_tokens(sources, "heldout", 1) == (1, (130 + 512) // 2)


def test_rows_without_text_are_counted_as_prompts_of_no_length(prompts):
    rows = [{"messages": 5}, {"messages": {"role": "user"}}, {"conversations": [{"value": ["x"]}, 7]}, {"prompt": None}]
    sources = prompts({"a.jsonl": [*rows, {"prompt": "\ud83d" * 130}]})
    assert prompts_and_tokens(sources, "train", None) == (5, 5 * 30 + 100)


@pytest.mark.parametrize("split", ["test", ["train"]])
def test_an_unknown_split_is_named(prompts, split):
    with pytest.raises(DraftlineError, match=r"a\.jsonl:2: split is .*, expected one of train, heldout"):
        prompts({"a.jsonl": [{"prompt": "x"}, {"prompt": "x", "split": split}]})


def test_the_builtin_prompts_are_counted_as_collect_prompts_reads_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    sources = count_prompts(Params().prompts)
    rows = [json.loads(line) for path in Path(Params().prompts.folder).glob("*.jsonl") for line in path.open()]
    for split in ("train", "heldout"):
        assert prompts_and_tokens(sources, split, None)[0] == sum(row["split"] == split for row in rows)


@pytest.mark.parametrize(("train", "heldout", "verdict"), [(16, 16, "ok"), (15, 16, "error"), (16, 15, "error")])
def test_each_split_needs_as_many_prompts_as_the_gate_wants(prompts, train, heldout, verdict):
    sources = prompts({"a.jsonl": [{"prompt": "x"}] * train, "heldout.jsonl": [{"prompt": "y"}] * heldout})
    assert check_prompts(Params(), sources).verdict == verdict


def test_nothing_held_out_is_an_error(prompts):
    assert check_prompts(Params(), prompts({"a.jsonl": [{"prompt": "x"}] * 16})).verdict == "error"


def test_a_folder_without_prompts_and_a_broken_line_are_named(prompts, tmp_path):
    with pytest.raises(DraftlineError, match=r"holds no \.jsonl file"):
        prompts({})
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(DraftlineError, match=r"broken\.jsonl:2"):
        prompts({})
    assert check_prompts(Params(), [], "broken.jsonl:2: not valid JSON").verdict == "error"
