"""`examined(checkpoint, ...)`: the doctor's verdicts, by id, on a checkpoint beside its target."""

import json
from pathlib import Path

import pytest

from tasks.common.check import Check
from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import Checkpoint, target_config


@pytest.fixture
def write_target(tmp_path):
    def write(kind: str = "llama", hidden: int = 32, **changes) -> Path:
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(target_config(kind, hidden) | changes))
        return folder

    return write


@pytest.fixture
def examined(tmp_path, write_target):
    def run(
        draft: Checkpoint, kind: str = "llama", hidden: int = 32, target: bool = True, **request
    ) -> dict[str, Check]:
        folder = draft.write(tmp_path / "draft")
        beside = write_target(kind, hidden) if target else None
        _, checks = examine(Request(folder, beside, **request))
        assert len({check.id for check in checks}) == len(checks)
        return {check.id: check for check in checks}

    return run
