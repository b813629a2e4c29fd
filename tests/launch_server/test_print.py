"""`python -m tasks.launch_server --print`: the line that people run, or what must be made first."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.common.errors import DraftlineError
from tasks.common.target import target_contract
from tasks.launch_server.__main__ import print_plan
from tests.random_draft import write_random_draft

ROOT = Path(__file__).parents[2]


@pytest.fixture
def exported(project, tiny_params):
    """A project with a target, an exported draft and params.yaml."""
    params = tiny_params(serve={"context_length": 512}, contract={"aux_layer_ids": [1, 3, 4]})
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))


def test_the_line_serves_the_draft_without_the_probes_flags(exported, capsys):
    print_plan()
    printed = capsys.readouterr().out
    line = printed.strip().splitlines()[-1]
    assert "--speculative-draft-model-path artifacts/export" in line
    assert "--enable-return-hidden-states" not in line
    assert "--disable-radix-cache" not in line
    assert not re.search(
        "benchmark|second server|both arms", printed
    )  # of which a server started by hand knows nothing


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("artifacts/target", "artifacts/target/config.json: not there. .*`dvc repro prepare_target`"),
        ("artifacts/export", "artifacts/export/config.json: not there"),
    ],
)
def test_what_is_not_made_yet_is_named(exported, absent, said):
    shutil.rmtree(absent)
    with pytest.raises(DraftlineError, match=said):
        print_plan()


@pytest.mark.parametrize(("word", "code"), [("--prnt", 1), ("--help", 0)])
def test_a_slip_starts_no_stage(word, code):
    ran = subprocess.run(
        [sys.executable, "-m", "tasks.launch_server", word], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == code
    assert "python -m tasks.launch_server --print" in ran.stdout + ran.stderr
    assert ("unknown arguments: --prnt" in ran.stderr) == bool(code)
