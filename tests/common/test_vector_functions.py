"""The first cosine and sine of our own processes: one element, not a rotary embedding's, which several threads share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.first_calls import FIRST_CALLS, ONE_ELEMENT

REPOSITORY = Path(__file__).parents[2]
MEASURED = """
import sys

with FirstCalls() as first, torch.no_grad():
    compute(sys.argv[1])
print(first.sizes)
"""
TARGET = """
def compute(folder):
    from tasks.common.target import load_causal_lm
    load_causal_lm(folder, "float32")(torch.arange(64)[None])
"""
DRAFT = """
def compute(folder):
    from tasks.common.draft import Eagle3Draft
    from tasks.common.params import ContractParams
    from tasks.common.target import TargetShape, load_config, target_contract
    draft = Eagle3Draft.for_target(TargetShape.of(load_config()), target_contract(ContractParams()), 50, torch.zeros(320, 64))
    draft.rotary(draft.rotary.inv_freq, torch.arange(64)[None])
"""


@pytest.mark.parametrize("computes", [TARGET, DRAFT], ids=["target", "draft"])
def test_the_first_cosine_of_a_process_is_one_threads_work(project, tiny_model_folder, computes):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS + computes + MEASURED, str(tiny_model_folder)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == [ONE_ELEMENT], done.stderr
