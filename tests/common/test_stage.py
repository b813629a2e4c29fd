"""How a command ends, in real processes: one sentence and the exit code that says why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError, in_a_line, signal_of

ROOT = Path(__file__).parents[2]
_COMMAND = """
import time
from tasks.common.errors import DraftlineError
from tasks.common.stage import ending_in_words
with ending_in_words("measure"):
    try:
        {deed}
    except BaseException as error:
        error.add_note("half.json holds what was measured.")
        raise
"""


def started(deed: str) -> subprocess.Popen:
    command = [sys.executable, "-c", _COMMAND.format(deed=deed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def outcome(process: subprocess.Popen) -> tuple[str, str]:
    """(stdout, stderr) of a command that ends within a minute."""
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_stopped_says_by_what_and_what_is_kept(number):
    process = started("print('up', flush=True); time.sleep(60)")
    process.stdout.readline()
    process.send_signal(number)
    _, said = outcome(process)
    assert said.endswith(f"measure was stopped by {number.name}. half.json holds what was measured.\n")
    assert process.returncode == 128 + number


def test_a_command_that_fails_says_why_and_what_is_kept():
    process = started("raise DraftlineError('the server died.')")
    _, said = outcome(process)
    assert said.endswith("measure failed:\nthe server died.\nhalf.json holds what was measured.\n")
    assert process.returncode == 1


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_command_that_exits_on_its_own_keeps_its_code_and_says_nothing(code):
    process = started(f"raise SystemExit({code})")
    assert "measure" not in "".join(outcome(process))
    assert process.returncode == code


def test_a_defect_keeps_its_traceback():
    process = started("raise KeyError('x')")
    assert "Traceback" in outcome(process)[1]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tasks.tune_server", []),
        ("tasks.profile_server", []),
        ("tasks.launch_server", ["--print"]),
        ("tasks.launch_server", []),
        ("tasks.benchmark", []),
    ],
)
def test_commands_fail_in_a_sentence(tmp_path, module, arguments):
    command = [sys.executable, "-m", module, *arguments]
    run = ended(command, tmp_path)
    assert run.stderr.endswith(
        f"{module.removeprefix('tasks.')} failed:\nparams.yaml: not there. Run from the repository's root, which holds it.\n"
    )
    assert run.returncode == 1


@pytest.mark.parametrize("module", ["tasks.tune_server", "tasks.profile_server", "tasks.benchmark.cross_check"])
def test_a_command_whose_report_cannot_be_written_does_not_begin(tmp_path, module):
    (tmp_path / "params.yaml").touch()
    (tmp_path / "reports").touch()
    run = ended([sys.executable, "-m", module], tmp_path)
    assert run.returncode == 1
    assert run.stderr.endswith(f"{module.rpartition('.')[2]} failed:\nreports: cannot be written: File exists.\n")


def test_a_stage_whose_report_cannot_be_written_does_not_begin(tmp_path):
    (tmp_path / "params.yaml").touch()
    (tmp_path / "reports").touch()
    stage = "from tasks.common.stage import run_stage; run_stage('verify_environment', lambda params, tracker: print('begun'))"
    run = ended([sys.executable, "-c", stage], tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.endswith("verify_environment failed:\nreports: cannot be written: File exists.\n")


@pytest.mark.parametrize(
    ("error", "number", "said"),
    [
        (KeyboardInterrupt(), signal.SIGINT, "SIGINT."),
        (SystemExit(143), signal.SIGTERM, "SIGTERM."),
        (SystemExit(129), signal.SIGHUP, "SIGHUP."),
        (SystemExit(75), None, "75"),
        (SystemExit("no such file"), None, "no such file"),
        (SystemExit(255), None, "255"),
        (DraftlineError("it\ndied"), None, "it died"),
        (KeyError(), None, "KeyError"),
    ],
)
def test_a_signal_is_told_from_a_failure(error, number, said):
    assert signal_of(error) == number
    assert in_a_line(error) == said
