import pytest

from tasks.common.contract import Contract, default_aux_layers
from tasks.common.errors import DraftlineError


def contract(**changes) -> Contract:
    return Contract(
        **{
            "architecture": "LlamaForCausalLM",
            "num_layers": 30,
            "hidden_size": 576,
            "vocab_size": 49152,
            "aux_layer_ids": (1, 14, 26),
            "last_is_normed": True,
            "target_sha256": "a",
            "tokenizer_sha256": "b",
        }
        | changes
    )


def test_default_layers_are_those_that_sglang_captures_without_ids():
    """SGLang's boundaries [2, N//2, N-3] are the outputs of 1, N//2-1, N-4."""
    assert default_aux_layers(30) == tuple(boundary - 1 for boundary in (2, 15, 27))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((-1, 2, 30), "-1 is not the embedding"),
        ((1, 14, 30), "must lie in 0..29"),
        ((14, 1, 26), "ascending"),
        ((1, 1, 26), "distinct"),
        ((14,), "skips fc"),
    ],
)
def test_layers_that_an_engine_would_misread_are_refused(ids, reason):
    with pytest.raises(DraftlineError, match=reason):
        contract(aux_layer_ids=ids)


def test_a_difference_names_field_and_both_sides():
    with pytest.raises(DraftlineError) as error:
        contract().require_same(
            contract(aux_layer_ids=(2, 15, 27)), "artifacts/hidden_states/train", "artifacts/export"
        )
    assert "aux_layer_ids: (1, 14, 26) in artifacts/hidden_states/train, (2, 15, 27) in artifacts/export" in str(
        error.value
    )


def test_equal_contracts_agree():
    contract().require_same(contract(), "a", "b")


def test_fc_reads_all_layers_side_by_side():
    assert contract().aux_width == 3 * 576
