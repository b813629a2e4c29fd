"""A stage without a tracker ends as a stage does: in words, with what the exception was given on its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("DraftlineError('the server died')", 1, "small_stage failed:\nthe server died\nKept in a file.\n"),
        ("KeyboardInterrupt()", 130, "small_stage was stopped by SIGINT. Kept in a file.\n"),
    ],
)
def test_what_ends_it_is_said_with_its_notes_and_no_traceback(tmp_path, raised, code, said):
    stage = tmp_path / "small_stage"
    stage.mkdir()
    (tmp_path / "params.yaml").write_text("{}\n")
    (stage / "__main__.py").write_text(
        "from tasks.common.errors import DraftlineError\n\n\n"
        f"def main(params, tracker):\n    error = {raised}\n    error.add_note('Kept in a file.')\n    raise error\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "infra.gpu.untracked", "small_stage"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (code, said)
