"""The stages of dvc.yaml, and one of them run as `dvc repro --single-item` in a process group of its own."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tasks.common.errors import DraftlineError

# From SIGTERM to SIGKILL. A stage that stops its server needs 1-2 s; the whole run must be gone within 10 s.
_GRACE_SECONDS = 5.0
# Libraries draw progress bars ten times a second, terminal or not; a log wants one now and then.
_REDRAW_SECONDS = 10.0
_UNCHANGED = re.compile(r"^Stage '.*' didn't change, skipping")
_RESTORED = re.compile(r"^Stage '.*' is cached - skipping run, checking out outputs")
# DVC's advice after each stage, meant for someone who runs it by hand.
_ADVICE = re.compile(
    r"To track the changes with git, run:|\s*git add |To enable auto staging, run:|\s*dvc config core.autostage"
    r"|Use `dvc push`|(Generating|Updating) lock file|Data and pipelines are up to date"
)


@dataclass(frozen=True)
class Stage:
    """A stage as dvc.yaml defines it.

    Attributes:
        description: `desc`.
        timeout_seconds: `meta.prefect.timeout_seconds`; None waits for ever.
    """

    name: str
    description: str
    timeout_seconds: float | None


def read_stages(until: str | None = None) -> list[Stage]:
    """The stages of the project in the current folder, each after all that it depends on.

    Args:
        until: only this stage and what it depends on.

    Raises:
        DraftlineError: there is no pipeline here, or no such stage in it.
    """
    import networkx
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            stages = {stage.addressing: stage for stage in repo.index.stages}
            graph = networkx.relabel_nodes(repo.index.graph, {stage: name for name, stage in stages.items()})
    except DvcException as error:
        raise DraftlineError(f"dvc.yaml: {error}") from None
    if not stages:
        raise DraftlineError("dvc.yaml: no stages here. Run from the repository's root, which holds it.")
    if until is not None:
        if until not in stages:
            raise DraftlineError(f"until: no stage is named {until}. Stages: {', '.join(stages)}.")
        graph = graph.subgraph({until} | networkx.descendants(graph, until))  # edges lead to dependencies
    rank = list(stages).index
    order = networkx.lexicographical_topological_sort(graph.reverse(), key=rank)
    return [
        Stage(name, stages[name].desc or "", (stages[name].meta or {}).get("prefect", {}).get("timeout_seconds"))
        for name in order
    ]


class StageProcess:
    """`dvc repro --single-item` of one stage. Iterate over it for its lines; leaving the context ends it."""

    def __init__(self, name: str, force: bool, environment: dict[str, str]):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # dvc runs `python`
        self.name = name
        self.outcome: Literal["ran", "unchanged", "restored"] = "ran"
        self._tail: deque[str] = deque(maxlen=40)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro", "--single-item", *(["--force"] if force else []), name],
            env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = io.TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace", newline="")

    def __enter__(self) -> "StageProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __iter__(self) -> Iterator[str]:
        next_redraw = 0.0
        for line in self._output:  # newline="" keeps "\r", with which a progress bar draws itself anew
            redraw, line = line.endswith("\r"), line.rstrip()
            if not line or _ADVICE.match(line) or (redraw and time.monotonic() < next_redraw):
                continue
            if redraw:
                next_redraw = time.monotonic() + _REDRAW_SECONDS
            self._tail.append(line)
            if _UNCHANGED.match(line):
                self.outcome = "unchanged"
            elif _RESTORED.match(line):
                self.outcome = "restored"
            yield line

    def exit_code(self) -> int:
        """Wait for the end."""
        return self._process.wait()

    def error(self) -> str:
        """What the stage said when it failed, else the last line."""
        lines = [line for line in self._tail if not line.startswith("ERROR: failed to reproduce")]
        start = max((i for i, line in enumerate(lines) if line == f"{self.name} failed:"), default=len(lines) - 2)
        return "\n".join(lines[start + 1 :])

    def _stop(self) -> None:
        """End every process of the group: ask, wait, kill. A second signal must not cut this short."""
        deaf = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
        heard = {number: signal.signal(number, signal.SIG_IGN) for number in deaf}
        try:
            failed = self._process.poll() != 0
            if not self._ended_within(0.0):
                self._signal(signal.SIGTERM)
                if not self._ended_within(_GRACE_SECONDS):
                    self._signal(signal.SIGKILL)
                    self._ended_within(_GRACE_SECONDS)
            self._output.close()
            if failed:
                # Servers live in sessions of their own. A stage that was killed could not stop its server.
                from tasks.common.server import reap_stale_servers

                for sentence in reap_stale_servers():
                    print(sentence, file=sys.stderr, flush=True)
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended_within(self, seconds: float) -> bool:
        """Whether the group is empty; dvc itself may be gone while the stage still stops its server."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None or _members(self._process.pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True


def _members(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
