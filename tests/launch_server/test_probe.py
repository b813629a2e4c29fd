"""What the launch concludes from the server's answers, and what of it goes into the report."""

import numpy as np
import pytest
import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.launch_server.__main__ import _bound
from tasks.launch_server.probe import Replay, compare, name_captured_layers, require_aux_width, require_telling_limit


@pytest.fixture
def contract() -> Contract:
    return Contract(
        architecture="LlamaForCausalLM",
        num_layers=8,
        hidden_size=64,
        vocab_size=320,
        aux_layer_ids=(1, 3, 4),
        last_is_normed=True,
        target_sha256="t",
        tokenizer_sha256="k",
    )


def test_rows_one_state_wide_are_named_as_the_eagle_mistake(contract):
    with pytest.raises(DraftlineError, match=r"64 wide, .* 3 x 64 = 192.* EAGLE instead of EAGLE3"):
        require_aux_width(np.zeros((5, 64), np.float32), contract)


def test_rows_of_another_number_of_layers_are_refused(contract):
    with pytest.raises(DraftlineError, match="captures another number of layers"):
        require_aux_width(np.zeros((5, 128), np.float32), contract)


def test_rows_as_wide_as_the_drafts_input_pass(contract):
    require_aux_width(np.zeros((5, 192), np.float32), contract)


def test_a_layer_read_one_too_late_is_named_slot_by_slot(contract, tiny_model_folder):
    from transformers import AutoModelForCausalLM

    from tasks.common.parity import layer_outputs

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 23, dtype=torch.int32)
    right = torch.stack(layer_outputs(model, ids, (1, 3, 4)), dim=1)
    late = torch.stack(layer_outputs(model, ids, (2, 4, 5)), dim=1)
    replay = Replay("sample-7", ids, right, late)

    parity = compare(replay, late, contract)
    assert [row.agreement for row in parity] == [row.shifted for row in parity]  # it reads exactly one layer late
    named = name_captured_layers(model, replay, late, parity, 1e-3)
    for slot, (wrong, expected) in enumerate(((2, 1), (4, 3), (5, 4))):
        assert f"slot {slot} is the output of layer {wrong} (relative error 0.0e+00; next best:" in named
        assert f"the contract says the output of layer {expected}" in named


def test_a_limit_that_the_wrong_reading_would_pass_is_refused():
    right = torch.ones(4, 3, 64)
    replay = Replay("sample-7", torch.arange(4), right, right * 1.25)
    require_telling_limit([replay], 1e-3)
    with pytest.raises(
        DraftlineError, match=r"max_relative_error is 0.3, but states read one layer late differ by only 0.25"
    ):
        require_telling_limit([replay], 0.3)


@pytest.mark.parametrize(("errors", "bound"), [([1.7e-7, 2.4e-7], 1e-5), ([2e-5], 1e-4), ([9.9e-4], 1e-3)])
def test_the_report_bounds_errors_by_powers_of_ten_since_last_digits_vary(errors, bound):
    assert _bound(errors, limit=1e-3) == pytest.approx(bound)
