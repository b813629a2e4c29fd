"""SGLang's own benchmark and ours on one real server on the CPU: tiny target, a draft that is accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.common.files import read_json
from tasks.common.params import Params
from tasks.common.server_session import port_is_free
from tests.ports import free_port_pair
from tests.tiny_run import AUX, TRAINED, train_tiny_draft

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
def test_both_count_the_same_tokens_rounds_and_drafts_of_one_run(tmp_path, monkeypatch, tiny_model_folder):
    monkeypatch.chdir(tmp_path)
    sections = {
        "target": {"model": str(tiny_model_folder)},
        "contract": {"aux_layer_ids": AUX},
        "train_draft": TRAINED,
        "serve": {
            "port": free_port_pair(),
            "context_length": 256,
            "max_total_tokens": 4096,
            "max_running_requests": 2,
        },
        "benchmark": {"num_prompts": 4, "max_new_tokens": 16, "warmup_prompts": 1, "concurrency": [1, 2]},
    }
    params = Params.model_validate(sections)
    Path("params.yaml").write_text(yaml.safe_dump(json.loads(params.model_dump_json())))
    train_tiny_draft(params)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tasks.benchmark.cross_check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "heldout, 2 at once, 8 requests, 3 passes" in done.stdout
    report = read_json(Path("reports/cross_check.json"))
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
