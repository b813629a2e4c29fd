"""SGLang's own benchmark and ours on one real server on the CPU: tiny target, a draft that is accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.benchmark import cross_check
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.params import Params
from tasks.common.server_session import port_is_free
from tests.ports import free_port_pair
from tests.tiny_run import AUX, SERVED, TRAINED, train_tiny_draft

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.faults
REPORT = Path("reports/cross_check.json")


@pytest.fixture(scope="module")
def params(tmp_path_factory, tiny_model_folder) -> Params:
    """Of a run with a trained draft, in a folder of its own that is the current directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cross_check"))
        sections = {
            "target": {"model": str(tiny_model_folder)},
            "contract": {"aux_layer_ids": AUX},
            "train_draft": TRAINED,
            "serve": SERVED | {"port": free_port_pair()},
            "benchmark": {"num_prompts": 4, "max_new_tokens": 16, "warmup_prompts": 1, "concurrency": [1, 2]},
        }
        made = Params.model_validate(sections)
        Path("params.yaml").write_text(yaml.safe_dump(json.loads(made.model_dump_json())))
        train_tiny_draft(made)
        yield made


def test_both_count_the_same_tokens_rounds_and_drafts_of_one_run(params):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tasks.benchmark.cross_check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "heldout, 2 at once, 8 requests, 3 passes" in done.stdout
    report = read_json(REPORT)
    assert [load["concurrency"] for load in report["loads"]] == [1, 2]
    for load in report["loads"]:
        rows = {(row["figure"], row["by_us"], row["by_sglang"]): row for row in load["pairs"]}
        for counted in (
            ("output tokens", "the answers", "the tool"),
            ("acceptance length", "the answers", "the tool"),
            ("acceptance length", "the answers", "/server_info"),
            ("acceptance length", "our traffic, in turn", "the tool"),
        ):
            assert (rows[counted]["least"], rows[counted]["most"]) == (1, 1)
        assert rows["acceptance length", "the answers", "the tool"]["ours"] > 1.5
        # The first request came after the tool's clock had started, and the last answer went out before it stopped.
        assert rows["tokens per second", "first request to last answer", "the tool"]["least"] >= 1
    assert port_is_free(params.serve.port)


def test_a_run_that_fails_in_its_first_load_leaves_no_earlier_report_that_would_pass_for_its_own(params, monkeypatch):
    def fail(*_):
        raise DraftlineError("the tool failed")

    monkeypatch.setattr(cross_check, "run_tool", fail)
    write_json(REPORT, {"complete": True})
    with pytest.raises(DraftlineError, match="the tool failed"):
        cross_check.main()
    assert not REPORT.exists()
