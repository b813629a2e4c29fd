import pytest

from tasks.common.capture import can_capture, capture_of, captured_layers, last_output, rows_of, served_layer_ids
from tasks.common.errors import DraftlineError
from tasks.common.sglang_versions import ENGINES, NEWEST, OLDEST, engine_of, number

RELEASES = [f"0.5.{patch}" for patch in range(16, 24)]
# One of each reading that SGLang's classes have: architecture, release, N, outputs, ids written.
WRITTEN = [
    ("LlamaForCausalLM", NEWEST, 32, (1, 15, 28), [1, 15, 28]),
    ("LlamaForCausalLM", NEWEST, 32, (0, 15, 30), [0, 15, 30]),
    ("MistralForCausalLM", OLDEST, 32, (2, 16, 29), [2, 16, 29]),
    ("Qwen2ForCausalLM", OLDEST, 28, (1, 13, 24), [1, 13, 24]),
    ("Qwen2MoeForCausalLM", OLDEST, 24, (1, 11, 20), [1, 11, 20]),
    ("Qwen3MoeForCausalLM", NEWEST, 48, (2, 24, 45), [2, 24, 45]),
    ("Qwen3NextForCausalLM", NEWEST, 48, (1, 23, 44), [1, 23, 44]),
    ("Qwen3_5MoeForConditionalGeneration", "0.5.22", 40, (1, 19, 36), [1, 19, 36]),
    ("Llama4ForConditionalGeneration", OLDEST, 48, (1, 23, 44), [1, 23, 44]),
    ("Glm4MoeForCausalLM", NEWEST, 46, (1, 22, 42), [1, 22, 42]),
    ("MiniMaxM3SparseForCausalLM", NEWEST, 60, (2, 30, 59), [2, 30, 59]),
    ("Gemma3ForCausalLM", OLDEST, 62, (1, 30, 61), [1, 30, 61]),
    ("Gemma4ForConditionalGeneration", NEWEST, 60, (1, 29, 59), [1, 29, 59]),
    ("GptOssForCausalLM", NEWEST, 36, (1, 17, 32), [1, 17, 32]),
    ("GptOssForCausalLM", NEWEST, 36, (23, 29, 35), [23, 29, 35]),
    ("DeepseekV3ForCausalLM", OLDEST, 61, (2, 30, 58), [3, 31, 59]),
    ("DeepseekV3ForCausalLM", NEWEST, 61, (1, 29, 57), [1, 29, 57]),
    ("KimiK25ForConditionalGeneration", NEWEST, 61, (2, 30, 58), [3, 31, 59]),
    ("Glm4MoeLiteForCausalLM", NEWEST, 47, (2, 23, 44), [3, 24, 45]),
    ("GlmMoeDsaForCausalLM", NEWEST, 78, (2, 39, 75), [3, 40, 76]),
]


@pytest.mark.parametrize(("architecture", "release", "layers", "outputs", "ids"), WRITTEN)
def test_ids_are_written_so_that_the_release_captures_the_outputs(architecture, release, layers, outputs, ids):
    assert served_layer_ids(outputs, architecture, layers, release) == ids
    assert captured_layers(ids, architecture, layers, release) == outputs


@pytest.mark.parametrize(
    "architecture", ["DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "MistralLarge3ForCausalLM"]
)
def test_the_first_users_config_was_off_by_one(architecture):
    """[2, 30, 58] was written for outputs 2, 30, 58, and captured 1, 29, 57."""
    assert captured_layers([2, 30, 58], architecture, 61) == (1, 29, 57)
    assert served_layer_ids((2, 30, 58), architecture, 61) == [3, 31, 59]


def test_a_boundary_reader_cannot_capture_output_0_first():
    with pytest.raises(DraftlineError, match="cannot capture output 0"):
        served_layer_ids((0, 30, 58), "KimiK25ForConditionalGeneration", 61)


def test_gpt_oss_takes_ids_for_boundaries_only_where_boundary_n_is_named():
    """nvidia/gpt-oss-120b-Eagle3-v3 names [24, 30, 36] of 36 layers: the outputs of 23, 29 and 35."""
    assert captured_layers([24, 30, 36], "GptOssForCausalLM", 36) == (23, 29, 35)
    assert captured_layers([24, 30, 35], "GptOssForCausalLM", 36) == (24, 30, 35)
    assert captured_layers([24, 30, 36], "GptOssForCausalLM", 36, "0.5.16") == (24, 30, 36)


@pytest.mark.parametrize(
    ("architecture", "release", "last"),
    [
        ("LlamaForCausalLM", NEWEST, 34),
        ("DeepseekV3ForCausalLM", NEWEST, 34),
        ("GptOssForCausalLM", "0.5.16", 34),
        ("GptOssForCausalLM", "0.5.17", 35),
        ("Gemma3ForCausalLM", "0.5.16", 35),
        ("Gemma4ForCausalLM", "0.5.22", 35),
        ("MiniMaxM3SparseForConditionalGeneration", "0.5.22", 34),
        ("MiniMaxM3SparseForConditionalGeneration", "0.5.23", 35),
    ],
)
def test_the_last_output_is_served_only_where_boundary_n_is_captured(architecture, release, last):
    assert last_output(architecture, 36, release) == last
    assert (
        captured_layers(served_layer_ids((5, 9, last), architecture, 36, release), architecture, 36, release)[-1]
        == last
    )
    with pytest.raises(DraftlineError, match=rf"must lie in 0\.\.{last} for a target of 36 layers"):
        served_layer_ids((5, 9, last + 1), architecture, 36, release)


def test_captures_come_in_layer_order_and_once():
    assert captured_layers([26, 1, 14, 1], "LlamaForCausalLM", 30) == (1, 14, 26)
    assert captured_layers([31, 1, 59], "DeepseekV3ForCausalLM", 61) == (0, 30, 58)


# Architecture, releases that capture outputs: read in the sources of each release.
USABLE = {
    "LlamaForCausalLM": RELEASES,
    "Gemma3ForCausalLM": ["0.5.16"],
    "Gemma3ForConditionalGeneration": ["0.5.16"],
    "Gemma4ForCausalLM": ["0.5.22", "0.5.23"],
    "MiniMaxM3SparseForCausalLM": RELEASES[2:],
    "MiniMaxM3SparseForConditionalGeneration": RELEASES[2:],
    "Qwen3_5ForConditionalGeneration": ["0.5.22", "0.5.23"],
    "Qwen3_5ForCausalLM": ["0.5.22", "0.5.23"],
    "InternS2MobiusForConditionalGeneration": ["0.5.22", "0.5.23"],
    "Qwen4ExpForConditionalGeneration": [],
    "ExaoneMoEForCausalLM": RELEASES,
    "ExaoneMoeForCausalLM": ["0.5.22", "0.5.23"],
    "Cosmos3ForConditionalGeneration": RELEASES[4:],
    "MixtralForCausalLM": [],
}


@pytest.mark.parametrize("architecture", USABLE)
def test_an_architecture_is_captured_by_the_releases_that_do(architecture):
    assert [release for release in RELEASES if can_capture(architecture, release)] == USABLE[architecture]


def test_a_release_without_the_hook_is_refused():
    with pytest.raises(DraftlineError, match=r"MixtralForCausalLM: not known to support .* in SGLang 0\.5\.23"):
        served_layer_ids((1, 14, 26), "MixtralForCausalLM", 32)
    assert capture_of("Qwen3_5ForCausalLM", "0.5.21") is None


def test_a_release_that_captures_something_else_is_refused():
    with pytest.raises(DraftlineError, match=r"Gemma3ForCausalLM: SGLang 0\.5\.17 captures each layer's MLP branch"):
        captured_layers([1, 30, 58], "Gemma3ForCausalLM", 62, "0.5.17")


def test_a_release_is_read_as_the_row_before_it():
    assert engine_of("0.5.16.post1") == ENGINES[0]
    assert [engine_of(release).norm_before_fc for release in ("0.5.16", "0.5.17", "0.5.22")] == [False, True, True]
    assert [engine_of(release).return_aux_hidden_states for release in ("0.5.17", "0.5.22", "0.5.23")] == [
        False,
        False,
        True,
    ]
    assert engine_of("0.6.0") == ENGINES[-1] and engine_of("0.5.15") is None
    assert number("0.5.24rc1") == (0, 5, 24)


@pytest.mark.parametrize("architecture", sorted({row[0] for row in WRITTEN} | USABLE.keys() - {"MixtralForCausalLM"}))
def test_rows_of_an_architecture_ascend_by_release(architecture):
    since = [number(row.since) for row in rows_of(architecture)]
    assert since == sorted(set(since))
