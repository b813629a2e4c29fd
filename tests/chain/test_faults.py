"""kill -9 in the two longest stages of a real run: `dvc repro` goes on where it was, nothing is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.faults


def kill_when(project, stage: str, due: Callable[[], bool]) -> None:
    """Start `dvc repro STAGE`, and kill the whole process group with SIGKILL as soon as `due()`."""
    with open(project.path("killed.log"), "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro", stage],
            cwd=project.root,
            env=project.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 900
    while not due():
        assert process.poll() is None, project.path("killed.log").read_text()[-4000:]
        assert time.monotonic() < deadline, "the stage never came so far"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(project) -> list[str]:
    journal = project.path("artifacts/responses/journal.jsonl")
    return journal.read_text().splitlines()[1:] if journal.exists() else []


def test_killed_stages_go_on_where_they_were(small_clone):
    prepared = small_clone.dvc("repro", "gate_prompts")
    assert prepared.returncode == 0, prepared.stdout[-4000:]

    kill_when(small_clone, "regenerate_responses", lambda: len(answers(small_clone)) >= 32)
    kept = answers(small_clone)
    resumed = small_clone.dvc("repro", "gate_hidden_states")
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    assert f"regenerating: {len(kept)}/60" in resumed.stdout
    final = {}
    for split, count in (("train", 48), ("heldout", 12)):
        rows = [
            json.loads(line) for line in small_clone.path(f"artifacts/responses/{split}.jsonl").read_text().splitlines()
        ]
        assert len(rows) == len({row["id"] for row in rows}) == count
        final |= {row["id"]: row["output_token_ids"] for row in rows}
    for record in map(json.loads, kept):
        assert final[record["id"]] == record["output_token_ids"]

    newest = small_clone.path("artifacts/draft/checkpoints/step-00000020.json")
    kill_when(small_clone, "train_draft", newest.exists)
    resumed = small_clone.dvc("repro", "train_draft")
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    assert "resuming after step 20 of 40" in resumed.stdout or "resuming after step 30 of 40" in resumed.stdout
    draft = small_clone.path("artifacts/draft/draft.safetensors").read_bytes()

    again = small_clone.dvc("repro", "--force", "--single-item", "train_draft")
    assert again.returncode == 0, again.stdout[-4000:]
    assert small_clone.path("artifacts/draft/draft.safetensors").read_bytes() == draft
