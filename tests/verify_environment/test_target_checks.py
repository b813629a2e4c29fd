"""Checks of the target: real config files through the real reader, and what they must agree with."""

import json

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.verify_environment.checks.target import (
    check_capture,
    check_config,
    check_dtype,
    check_layers,
    check_lengths,
    check_memory,
)
from tasks.verify_environment.facts import Engine, Gpu, Gpus, TargetFacts
from tasks.verify_environment.probes.target import find

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
NO_GPUS = Gpus(error="no nvidia-smi on PATH")


@pytest.fixture
def read(tmp_path):
    """Write config.json and read it as the probe does."""

    def read(dtype="float32", **fields) -> TargetFacts:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
        return TargetFacts.model_validate(find({"model": str(tmp_path), "dtype": dtype}))

    return read


def params(**sections) -> Params:
    return Params.model_validate({"train_draft": {"draft_vocab_size": 320}, **sections})


def test_a_target_is_known_from_its_config_alone(read):
    target = read()
    assert target.shape.num_layers == 8
    assert target.weight_bytes == 4 * target.parameters
    assert check_config(params(), target).verdict == "ok"


def test_sixteen_bit_weights_take_half(read):
    assert read("bfloat16").weight_bytes == 2 * read().parameters


def test_a_quantised_target_takes_what_its_files_take(read, tmp_path):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    assert read(**quantised).weight_bytes == read().parameters
    (tmp_path / "model.safetensors").write_bytes(b"0" * 12345)
    target = read(**quantised)
    assert (target.quantisation, target.weight_bytes) == ("fp8", 12345)


def test_a_folder_without_a_config_is_an_error(tmp_path):
    with pytest.raises(DraftlineError, match=r"no config\.json"):
        find({"model": str(tmp_path)})
    assert check_config(params(), TargetFacts(error="no config.json")).verdict == "error"


def test_a_model_without_rope_is_refused(read):
    with pytest.raises(DraftlineError, match="decoder-only model with RMSNorm and RoPE"):
        read(model_type="gpt2", architectures=["GPT2LMHeadModel"])


def test_a_known_architecture_with_the_hook_is_supported(read):
    assert check_capture(read(), Engine(captures=True)).verdict == "ok"


def test_an_unknown_architecture_is_an_error_even_if_the_engine_has_the_hook(read):
    target = read(architectures=["MixtralForCausalLM"], model_type="mistral")
    with_hook, without = (check_capture(target, Engine(captures=captures)) for captures in (True, None))
    assert with_hook.verdict == without.verdict == "error"
    assert "tasks/common/capture.py" in with_hook.fix
    assert "tasks/common/capture.py" not in without.fix


@pytest.mark.parametrize("captures", [False, None])
def test_an_engine_without_the_hook_is_an_error(read, captures):
    assert check_capture(read(), Engine(captures=captures)).verdict == "error"


def test_what_the_engine_captures_is_not_blamed_on_the_target_when_the_engine_is_broken(read):
    assert check_capture(read(), Engine(error="killed by signal 11")).verdict == "ok"


def test_default_layers_are_those_that_sglang_would_take(read):
    check = check_layers(params(), read())
    assert (check.verdict, check.found) == ("ok", "outputs [1, 3, 4], written [1, 3, 4] in the served config")


def test_ids_of_a_boundary_reader_are_shown_as_they_must_be_written(read):
    target = read(architectures=["DeepseekV3ForCausalLM"])
    check = check_layers(params(contract={"aux_layer_ids": [2, 4, 5]}), target)
    assert "written [3, 5, 6]" in check.found


@pytest.mark.parametrize("ids", [[2, 4, 7], [-1, 2, 4], [4, 2, 1], [2, 2, 4], [3]])
def test_layers_that_the_engine_would_read_otherwise_are_errors(read, ids):
    assert check_layers(params(contract={"aux_layer_ids": ids}), read()).verdict == "error"


def test_too_few_layers_for_the_default_is_an_error(read):
    assert check_layers(params(), read(num_hidden_layers=4)).verdict == "error"


@pytest.mark.parametrize(
    ("device", "dtype", "storage", "verdict"),
    [
        ("cpu", "float32", "float32", "ok"),
        ("cpu", "bfloat16", "bfloat16", "warning"),
        ("cuda", "bfloat16", "bfloat16", "ok"),
        ("cuda", "float32", "float32", "warning"),
        ("cuda", "bfloat16", "float16", "warning"),
    ],
)
def test_a_dtype_that_is_slow_or_overflows_is_a_warning(read, device, dtype, storage, verdict):
    chosen = params(target={"device": device, "dtype": dtype}, dump={"storage_dtype": storage})
    assert check_dtype(chosen, read()).verdict == verdict


def test_float16_for_bfloat16_weights_is_a_warning(read):
    chosen = params(target={"device": "cuda", "dtype": "float16"})
    assert check_dtype(chosen, read(dtype="float16")).verdict == "ok"
    assert "65504" in check_dtype(chosen, read(torch_dtype="bfloat16")).fix


def test_samples_longer_than_the_target_reaches_are_an_error(read):
    check = check_lengths(params(regenerate={"max_new_tokens": 4000}), read())
    assert check.verdict == "error"
    assert "4096" in check.fix


def test_a_benchmark_that_outgrows_the_served_context_is_an_error(read):
    assert check_lengths(params(), read()).verdict == "ok"
    check = check_lengths(params(benchmark={"max_new_tokens": 64}, serve={"context_length": 579}), read())
    assert check.verdict == "error"
    assert "580" in check.fix  # 512 + 64 + 4


def test_answers_that_outgrow_the_served_context_are_an_error_where_sglang_writes_them(read):
    for engine, served, verdict in (("sglang", 2560, "ok"), ("sglang", 2559, "error"), ("transformers", 2559, "ok")):
        chosen = params(
            regenerate={"engine": engine, "max_new_tokens": 2048},
            serve={"context_length": served},
        )
        check = check_lengths(chosen, read())
        assert check.verdict == verdict
        assert verdict == "ok" or "grow to 2560: set serve.context_length" in check.fix  # 512 + 2048


def test_a_draft_vocabulary_larger_than_the_targets_is_an_error(read):
    assert check_lengths(params(train_draft={"draft_vocab_size": 321}), read()).verdict == "error"


def test_memory_must_hold_the_weights_and_should_hold_a_server(read):
    target = read()
    assert check_memory(params(), target, NO_GPUS, int(8e9)).verdict == "ok"
    assert check_memory(params(), target, NO_GPUS, int(1e9)).verdict == "warning"
    assert check_memory(params(), target, NO_GPUS, target.weight_bytes - 1).verdict == "error"


def gpu_memory_check(weights_gb: float, gpus: int = 8, device_map: str | None = None, **serve):
    facts = tuple(Gpu(index=i, name="NVIDIA H200", memory_total_mib=143771, memory_used_mib=0) for i in range(gpus))
    shape = {"shape": SHAPE, "weight_bytes": int(weights_gb * 1e9), "parameters": 1, "active_parameters": 1}
    chosen = params(target={"device": "cuda", "dtype": "bfloat16", "device_map": device_map}, serve=serve)
    return check_memory(chosen, TargetFacts.model_validate(shape), Gpus(gpus=facts), 0)


SHAPE = {
    "architecture": "LlamaForCausalLM",
    "num_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 5e5},
    "tie_word_embeddings": False,
}


def test_weights_must_fit_into_the_static_share_of_a_gpu():
    assert gpu_memory_check(16).verdict == "ok"
    check = gpu_memory_check(60)
    assert check.verdict == "error"
    assert "--tp-size" in check.fix
    assert gpu_memory_check(60, extra_args=["--tp-size", "2"]).verdict == "ok"


def test_a_target_larger_than_one_gpu_must_be_spread_for_transformers():
    served = {"extra_args": ["--tp-size=8"]}
    check = gpu_memory_check(300, **served)
    assert check.verdict == "error"
    assert "target.device_map: auto" in check.fix
    assert gpu_memory_check(300, device_map="auto", **served).verdict == "ok"
    assert gpu_memory_check(300, gpus=2, device_map="auto", **served).verdict == "error"
