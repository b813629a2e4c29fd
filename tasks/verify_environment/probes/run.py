"""Start probes, wait for all of them, and leave none behind."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# SGLang imports in 10 s on an idle host, and took 180 s on one with seven times more work than cores.
TIMEOUT_S = 450


@dataclass(frozen=True)
class Probe:
    """A program in this package, `python -m tasks.verify_environment.probes.<name>`.

    Attributes:
        arguments: passed as JSON.
        environment: all of it; None inherits this process's own.
        python: the interpreter that runs it.
    """

    name: str
    arguments: Any = None
    environment: Mapping[str, str] | None = None
    python: str = sys.executable


def run_probes(*probes: Probe) -> dict[str, dict]:
    """Run all at once; each answers with one JSON object on its standard output's last line.

    Returns:
        The answers by name. A probe that crashed, hung, or answered nothing gives {"error": why}: this never raises.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        running: dict[str, subprocess.Popen] = {}
        answers: dict[str, dict] = {}
        try:
            for probe in probes:
                try:
                    running[probe.name] = _start(probe, Path(scratch))
                except OSError as error:
                    answers[probe.name] = {"error": f"{probe.python}: {error.strerror}"}
            for name, process in running.items():
                answers[name] = _answer(process, Path(scratch) / name, started)
        finally:
            for process in running.values():
                process.kill()  # does nothing to one that has ended
                process.wait()
    return answers


def _start(probe: Probe, scratch: Path) -> subprocess.Popen:
    # Files, not pipes: what a library prints while it is imported must not block it.
    with open(scratch / f"{probe.name}.out", "wb") as out, open(scratch / f"{probe.name}.err", "wb") as err:
        return subprocess.Popen(
            [probe.python, "-m", f"{__package__}.{probe.name}", json.dumps(probe.arguments)],
            env=probe.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _answer(process: subprocess.Popen, files: Path, started: float) -> dict:
    try:
        code = process.wait(max(0, started + TIMEOUT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {TIMEOUT_S} s"}
    try:
        return json.loads(files.with_suffix(".out").read_text(errors="replace").splitlines()[-1])
    except (IndexError, ValueError):
        lines = files.with_suffix(".err").read_text(errors="replace").strip().splitlines()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return {"error": f"{how}: {lines[-1].strip() if lines else 'nothing printed'}"}
