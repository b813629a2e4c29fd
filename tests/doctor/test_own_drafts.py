"""Draftline's own export and its own server plan pass the doctor without an error or a warning."""

import shlex
from pathlib import Path

import pytest

from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import TARGET, target_contract
from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import not_fine
from tests.random_draft import write_random_draft


@pytest.fixture
def plan(project, tiny_params):
    params = tiny_params(serve={"context_length": 512}, contract={"aux_layer_ids": [1, 3, 4]})
    write_random_draft(Path("artifacts/export"), target_contract(params.contract))
    return speculative_plan(params)


def test_our_own_export_and_plan_pass(plan):
    line = shlex.join(plan.command("nonce"))
    _, checks = examine(Request(Path("artifacts/export"), TARGET, plan=line))
    assert not_fine({check.id: check for check in checks}) == {}


def test_our_own_probe_passes(plan):
    line = shlex.join(plan.with_hidden_states().command("nonce"))
    _, checks = examine(Request(Path("artifacts/export"), TARGET, plan=line))
    assert {check.id: check for check in checks}["H1 hidden states"].verdict == "ok"
