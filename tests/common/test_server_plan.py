"""What a plan says to SGLang, and the mistakes that it refuses before anything starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.common.errors import DraftlineError
from tasks.common.server_plan import baseline_plan, process_environment, spanned_gpus
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import target_contract
from tests.random_draft import write_random_draft

SERVE = {"context_length": 512, "port": 31201}
AUX = {"aux_layer_ids": [1, 3, 4]}


@pytest.fixture
def make_plan(project, tiny_params):
    """`make_plan(config={...}, contract={...}, **sections)`: the plan over an export with these values replaced."""

    def make(config=None, contract=None, **sections):
        params, draft = tiny_params(**{"serve": SERVE, "contract": AUX} | sections), Path("artifacts/export")
        carried = target_contract(params.contract)
        write_random_draft(draft, carried, **(config or {}))
        (draft / "draftline.json").write_text(json.dumps({"contract": carried.model_dump() | (contract or {})}))
        return speculative_plan(params)

    return make


def said(plan) -> dict[str, str]:
    return {setting.name: " ".join(setting.values) for setting in (*plan.environment, *plan.flags)}


# --- refusals


def test_eagle_for_an_eagle3_draft_is_refused_with_what_would_happen(make_plan):
    with pytest.raises(DraftlineError) as refusal:
        make_plan(serve=SERVE | {"speculative_algorithm": "EAGLE"})
    for part in (
        "serve.speculative_algorithm in params.yaml",
        "fc is never called",
        "64-wide",
        "3 x 64 = 192",
        "EAGLE3",
    ):
        assert part in str(refusal.value)


@pytest.mark.parametrize("algorithm", ["NEXTN", "NGRAM"])
def test_nothing_but_eagle3_is_planned(make_plan, algorithm):
    with pytest.raises(DraftlineError, match=rf"C1 algorithm: {algorithm} .* from serve\.speculative_algorithm"):
        make_plan(serve=SERVE | {"speculative_algorithm": algorithm})


def test_sglang_takes_the_algorithm_in_either_case_and_reports_it_in_capitals(make_plan):
    plan = make_plan(serve=SERVE | {"speculative_algorithm": "eagle3"})
    assert plan.algorithm == "EAGLE3"


def test_a_draft_of_another_contract_is_refused_by_field(make_plan):
    with pytest.raises(
        DraftlineError, match=r"aux_layer_ids: \(2, 3, 4\) in .*draftline.json, \(1, 3, 4\) in the target"
    ):
        make_plan(contract={"aux_layer_ids": [2, 3, 4]})


def test_a_draft_of_another_target_is_refused(make_plan):
    with pytest.raises(DraftlineError, match="target_sha256"):
        make_plan(contract={"target_sha256": "another"})


def test_config_ids_that_sglang_reads_as_other_layers_are_refused(make_plan):
    shifted = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True}}
    with pytest.raises(DraftlineError, match=r"outputs of layers \[2, 4, 5\]; it was trained on \[1, 3, 4\]"):
        make_plan(config=shifted)


def test_a_broken_export_is_refused_before_a_server_loads_it_with_random_weights(make_plan, tiny_params):
    make_plan()
    tensors = load_file("artifacts/export/model.safetensors")
    tensors["fc.weights"] = tensors.pop("fc.weight")
    save_file(tensors, "artifacts/export/model.safetensors")
    with pytest.raises(DraftlineError, match=r"fc\.weight is missing; SGLang would leave random values there"):
        speculative_plan(tiny_params(serve=SERVE, contract=AUX))


def test_another_dtype_than_the_draft_was_trained_in_is_refused(make_plan, tiny_params):
    target = tiny_params().target.model_dump() | {"dtype": "bfloat16"}
    with pytest.raises(DraftlineError, match=r"--dtype bfloat16 for a draft of float32.* from target\.dtype in params"):
        make_plan(target=target)


def test_a_draft_with_fewer_positions_than_are_served_is_refused(make_plan):
    with pytest.raises(DraftlineError, match=r"is 256, served is --context-length 512.* from serve\.context_length"):
        make_plan(config={"max_position_embeddings": 256})


def test_flags_of_the_user_are_judged_by_the_doctors_rules(make_plan):
    serve = SERVE | {"eagle_topk": 4, "num_draft_tokens": 8, "extra_args": ["--page-size", "64"]}
    with pytest.raises(DraftlineError, match=r"S3 page size: page size 64 with top-k 4.* from serve\.eagle_topk"):
        make_plan(serve=serve)


def test_another_rope_than_the_targets_is_refused(make_plan):
    other = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(DraftlineError, match="W6 RoPE"):
        make_plan(config=other)


def test_a_context_beyond_the_target_is_refused(project, tiny_params):
    with pytest.raises(DraftlineError, match=r"serve.context_length is 2048, but .* has 1024 positions"):
        baseline_plan(tiny_params(contract=AUX))


@pytest.mark.parametrize(
    "words",
    [["--port", "1"], ["--speculative-algorithm=EAGLE"], ["--model", "x"], ["--context-len", "9"], ["--spec", "x"]],
)
def test_extra_arguments_cannot_override_what_was_checked(make_plan, words):
    with pytest.raises(
        DraftlineError, match=f"extra_args holds {words[0].partition('=')[0]}, which Draftline sets itself"
    ):
        make_plan(serve=SERVE | {"extra_args": words})


def test_the_drafts_attention_may_be_another_than_the_targets(make_plan):
    words = ["--attention-backend", "fa3", "--speculative-draft-attention-backend", "triton"]
    planned = said(make_plan(serve=SERVE | {"extra_args": words}))
    assert [planned[name] for name in words[::2]] == ["fa3", "triton"]


@pytest.mark.parametrize("words", [["--help"], ["--tp-size", "2", "--hel"], ["-h"], ["--tp-size", "2", "-h"]])
def test_a_server_that_would_print_its_flags_and_exit_is_not_planned(make_plan, words):
    with pytest.raises(DraftlineError, match=rf"serve\.extra_args holds {words[-1]}[,;]"):
        make_plan(serve=SERVE | {"extra_args": words})


def test_a_flag_of_the_user_that_is_no_number_is_named_by_its_parameter(make_plan):
    with pytest.raises(
        DraftlineError, match=r"^params\.yaml: serve\.extra_args: --page-size is 'x', expected an integer"
    ):
        make_plan(serve=SERVE | {"extra_args": ["--page-size", "x"]})


@pytest.mark.parametrize("name", ["SGLANG_SIMULATE_ACC_LEN", "SGL_SIMULATE_ACC_LEN"])
@pytest.mark.parametrize("of_shell", [True, False])
def test_a_server_that_would_simulate_its_acceptance_is_refused(make_plan, monkeypatch, of_shell, name):
    if of_shell:
        monkeypatch.setenv(name, "3.5")
    with pytest.raises(
        DraftlineError, match=rf"^{'the shell' if of_shell else 'params.yaml: serve.environment'} sets {name}:"
    ):
        make_plan(serve=SERVE if of_shell else SERVE | {"environment": {name: "3.5"}})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("[]", "expected a JSON object, found list"),
        ("{}", r"holds no contract\. Export the draft again"),
        ('{"contract": null}', r"holds no contract\. Export the draft again"),
        ('{"contract": {"x": 1}}', r"holds no contract \(x: Extra inputs are not permitted \(found 1\)\)"),
        ("[" * 9999, "not valid JSON"),
    ],
)
def test_a_damaged_record_of_our_own_draft_is_named_with_the_fix(make_plan, tiny_params, record, said):
    make_plan()
    Path("artifacts/export/draftline.json").write_text(record)
    with pytest.raises(DraftlineError, match=rf"artifacts/export/draftline\.json: .*{said}"):
        speculative_plan(tiny_params(serve=SERVE, contract=AUX))


def test_a_record_of_impossible_layers_is_named(make_plan):
    with pytest.raises(
        DraftlineError, match=r"draftline\.json: .*aux_layer_ids \[3, 1\]: must be distinct and ascending"
    ):
        make_plan(contract={"aux_layer_ids": [3, 1]})


def test_an_export_without_its_record_is_refused(make_plan, tiny_params):
    make_plan()
    Path("artifacts/export/draftline.json").unlink()
    with pytest.raises(DraftlineError, match=r"artifacts/export/draftline\.json: not there\. .*`dvc repro"):
        speculative_plan(tiny_params(serve=SERVE, contract=AUX))


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE", "PYTHONPATH", "MASTER_PORT"])
def test_a_variable_that_the_plan_sets_itself_cannot_come_from_the_environment_of_params(make_plan, name):
    with pytest.raises(DraftlineError, match=f"serve.environment sets {name}, which is set by"):
        make_plan(serve=SERVE | {"environment": {name: "1"}})


# --- command lines


def test_a_server_started_under_torchrun_is_none_of_its_group(make_plan, monkeypatch):
    of_group = {"RANK": "1", "LOCAL_RANK": "1", "ROLE_WORLD_SIZE": "2", "MASTER_PORT": "29500", "ROLE_NAME": "default"}
    for name, value in (of_group | {"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_DEBUG": "INFO"}).items():
        monkeypatch.setenv(name, value)
    environment = process_environment(make_plan().environment)
    assert environment.keys().isdisjoint({*of_group, "TORCHELASTIC_USE_AGENT_STORE"})
    assert environment["NCCL_DEBUG"] == "INFO"


def test_the_cpu_server_verifies_drafts_with_the_stand_in_kernels(make_plan):
    words = said(make_plan())
    assert words["SGLANG_USE_CPU_ENGINE"] == "1"
    assert words["PYTHONPATH"].endswith("infra/sglang_cpu")
    assert words["--prefill-attention-backend"] == words["--decode-attention-backend"] == "intel_amx"
    assert words["--speculative-algorithm"] == "EAGLE3"
    assert words["--speculative-draft-model-path"] == "artifacts/export"
    assert [words[f"--speculative-{flag}"] for flag in ("num-steps", "eagle-topk", "num-draft-tokens")] == [
        "3",
        "1",
        "4",
    ]
    assert words["--dtype"] == "float32"


def test_the_cuda_server_gets_nothing_that_is_meant_for_a_cpu(project, make_plan, tiny_params):
    target = tiny_params().target.model_dump() | {"device": "cuda:1"}
    words = said(make_plan(target=target))
    assert words["--device"] == "cuda"
    assert words["--base-gpu-id"] == "1"
    assert set(words).isdisjoint({"SGLANG_USE_CPU_ENGINE", "PYTHONPATH", "--prefill-attention-backend"})


def test_both_arms_of_the_benchmark_get_the_same_flags(make_plan, tiny_params):
    speculative = said(make_plan(serve=SERVE | {"extra_args": ["--tp-size", "2"]}))
    baseline = said(baseline_plan(tiny_params(contract=AUX, serve=SERVE | {"extra_args": ["--tp-size", "2"]})))
    assert {name: value for name, value in speculative.items() if not name.startswith("--speculative-")} == baseline
    assert baseline["--tp-size"] == "2"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("tokens", "bounded"), [(2048, True), (None, False)])
def test_only_a_stated_cache_lets_servers_start_side_by_side(make_plan, device, tokens, bounded):
    plan = replace(make_plan(serve=SERVE | {"max_total_tokens": tokens}), device=device)
    assert plan.bounds_its_cache is bounded


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("", 1),
        ("--tp-size 2 --pp-size=3", 6),
        ("--tensor-parallel-size 2 --pipeline-parallel-size 3", 6),
        ("--tp 4 --data-parallel-size 2", 8),
        ("--tp-size 8 --dp-size 8 --enable-dp-attention", 8),
        ("--tp-size 8 --attn-dp-size 8", 8),
        ("--tp-size 4 --ep-size 4", 4),
    ],
)
def test_a_server_spans_the_gpus_of_its_parallel_sizes(line, gpus):
    assert spanned_gpus(line.split()) == gpus


def test_both_arms_of_the_benchmark_get_the_same_environment(make_plan, tiny_params):
    serve = SERVE | {"environment": {"NCCL_ALGO": "Ring"}}
    for plan in (make_plan(serve=serve), baseline_plan(tiny_params(contract=AUX, serve=serve))):
        assert said(plan)["NCCL_ALGO"] == process_environment(plan.environment)["NCCL_ALGO"] == "Ring"


def test_a_quantised_target_does_not_quantise_its_draft(project, make_plan):
    config = Path("artifacts/target/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    assert said(make_plan())["--speculative-draft-model-quantization"] == "unquant"


def test_a_plain_target_needs_no_word_about_the_drafts_quantisation(make_plan):
    assert "--speculative-draft-model-quantization" not in said(make_plan())


def test_the_probe_turns_off_the_cache_that_would_swallow_states(make_plan):
    words = said(make_plan().with_hidden_states())
    assert {"--enable-return-hidden-states", "--disable-radix-cache"} <= set(words)


def test_every_setting_has_a_reason(make_plan):
    plan = make_plan().with_hidden_states()
    assert all(setting.reason for setting in (*plan.environment, *plan.flags))


def test_the_command_ends_with_the_nonce(make_plan):
    assert make_plan().command("abc")[-2:] == ["--weight-version", "abc"]
