"""The plan: what scales with what, and figures that are known from real runs."""

import pytest

from tasks.common.params import Params
from tasks.verify_environment.facts import Compute, TargetFacts
from tasks.verify_environment.plan import Estimate, Workload, estimate, server_gpus
from tasks.verify_environment.prompt_sources import PromptSource

SMOLLM2 = {
    "shape": {
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 1e5},
        "tie_word_embeddings": True,
    },
    "parameters": 134_500_000,
    "active_parameters": 134_500_000,
    "weight_bytes": 538_000_000,
}
# The embedded default on two idle cores; SmolLM2 in bfloat16 and Kimi-K2.5 (4-bit experts) on H200s.
TWO_CORES = Compute(matmul_flops=320e9, memory_bytes_per_s=10e9)
H200 = Compute(matmul_flops=790e12, memory_bytes_per_s=4e12)
KIMI = {
    "shape": {**SMOLLM2["shape"], "architecture": "DeepseekV3ForCausalLM", "num_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 112, "tie_word_embeddings": False},
    "parameters": 1_030_000_000_000,
    "active_parameters": 32_000_000_000,
    "weight_bytes": 595_000_000_000,
}  # fmt: skip


def plan(speed=TWO_CORES, model=SMOLLM2, prompts=432, tokens=37_000, **sections) -> dict[str, Estimate]:
    params = Params.model_validate(sections)
    sources = [PromptSource("a.jsonl", "train", prompts, tokens), PromptSource("b.jsonl", "heldout", 66, 5_800)]
    load = Workload.of(params, sources)
    return {e.stage: e for e in estimate(params, load, TargetFacts.model_validate(model), speed)}


def test_states_take_the_bytes_that_the_contract_says():
    dump = plan()["dump_hidden_states"]
    assert dump.tokens == 37_000 + 5_800 + (432 + 66) * 48
    assert dump.disk_bytes == dump.tokens * ((3 + 1) * 576 * 4 + 5)


def test_states_of_more_layers_and_fewer_bytes():
    dump = plan(contract={"aux_layer_ids": [1, 5, 9, 20]}, dump={"storage_dtype": "bfloat16"})["dump_hidden_states"]
    assert dump.disk_bytes == dump.tokens * ((4 + 1) * 576 * 2 + 5)


def test_a_ring_takes_the_disk_of_its_shards_and_of_the_held_out_states():
    heldout = 5_800 + 66 * 48
    ring = plan(dump={"ahead_shards": 2, "shard_tokens": 4096})["dump_hidden_states"]
    assert ring.disk_bytes == (heldout + 2 * (4096 + 512 + 48)) * ((3 + 1) * 576 * 4 + 5)
    assert ring.seconds == plan()["dump_hidden_states"].seconds  # all of them are computed and written
    assert plan(dump={"ahead_shards": 999})["dump_hidden_states"].disk_bytes == plan()["dump_hidden_states"].disk_bytes


def test_a_token_of_the_first_users_target_takes_57_kilobytes():
    dump = plan(H200, KIMI, dump={"storage_dtype": "bfloat16"})["dump_hidden_states"]
    assert dump.disk_bytes / dump.tokens == 4 * 7168 * 2 + 5


def test_a_dump_through_sglang_has_the_measured_share_of_transformers_prefill_and_writes_beside_it():
    """219,660 against 345,573 tokens/s on an H200 (infra/docs/hidden_states.md)."""

    def seconds_a_token(engine: str, hidden_size: int = 576) -> float:
        target = {**SMOLLM2, "shape": {**SMOLLM2["shape"], "hidden_size": hidden_size}}
        few, many = (
            plan(dump={"engine": engine}, model=target, tokens=n)["dump_hidden_states"] for n in (10**6, 10**7)
        )
        return (many.seconds - few.seconds) / (many.tokens - few.tokens)

    writing = (4 * 576 * 4 + 5) / 300e6
    prefill = seconds_a_token("transformers") - writing
    assert seconds_a_token("sglang") == pytest.approx(prefill * 345_573 / 219_660, rel=0.01)
    assert seconds_a_token("sglang", 100 * 576) == pytest.approx((4 * 57_600 * 4 + 5) / 300e6)  # its disk is the slower


def test_a_dump_through_sglang_starts_a_server_and_holds_its_gpus():
    target = {"device": "cuda", "dtype": "bfloat16"}
    served = plan(H200, target=target, dump={"engine": "sglang"}, serve={"extra_args": ["--tp-size", "8"]}, prompts=0)
    assert served["dump_hidden_states"].gpus == 8
    assert served["dump_hidden_states"].seconds > 130
    assert plan(H200, target=target)["dump_hidden_states"].gpus == 1


def test_a_limit_on_prompts_limits_tokens_in_proportion():
    load = Workload.of(
        Params.model_validate({"prompts": {"max_train": 100}, "regenerate": {"max_new_tokens": 10}}),
        [PromptSource("a.jsonl", "train", 1000, 90_000), PromptSource("b.jsonl", "heldout", 50, 5_000)],
    )
    assert (load.prompts, load.prompt_tokens, load.answer_tokens) == (150, 14_000, 1_500)
    assert load.train_tokens == 9_000 + 1_000


def test_longer_answers_cost_time_and_disk():
    short, long = plan(), plan(regenerate={"max_new_tokens": 640})
    assert long["regenerate_responses"].seconds > 5 * short["regenerate_responses"].seconds
    assert long["dump_hidden_states"].disk_bytes > 3 * short["dump_hidden_states"].disk_bytes


def test_training_time_follows_steps_batch_and_chain():
    base = plan()["train_draft"].seconds
    assert plan(train_draft={"max_steps": 4000})["train_draft"].seconds > 7 * base
    assert plan(train_draft={"ttt_length": 6})["train_draft"].seconds > 1.5 * base


def test_a_cpu_costs_no_gpu_hours():
    assert sum(e.gpu_hours for e in plan().values()) == 0


def test_a_server_holds_the_gpus_of_its_parallel_sizes():
    def gpus(*words: str) -> int:
        return server_gpus(Params.model_validate({"target": {"device": "cuda"}, "serve": {"extra_args": words}}))

    assert gpus() == 1
    assert gpus("--tp-size", "8") == gpus("--tp=8") == 8
    assert gpus("--tp-size", "4", "--attention-backend", "triton", "--dp-size", "2") == 8


def test_the_embedded_default_fits_into_a_coffee_break():
    total = sum(e.seconds for e in plan().values())
    assert 5 * 60 < total < 20 * 60


def decode_rate(speed, model, batch, **sections) -> float:
    """Tokens a second of the estimate for regeneration, prefill and start-up apart."""
    few, many = (
        plan(speed, model, prompts=batch * n - 66, tokens=0, **sections)["regenerate_responses"].seconds
        for n in (10, 20)
    )
    return batch * 10 * 48 / (many - few)


def test_transformers_on_two_cores_decode_at_the_measured_rate():
    assert decode_rate(TWO_CORES, SMOLLM2, 32) == pytest.approx(192, rel=0.3)


def test_sglang_on_a_gpu_decodes_a_small_model_at_the_measured_rate():
    on_gpu = {
        "target": {"device": "cuda", "dtype": "bfloat16"},
        "regenerate": {"engine": "sglang", "batch_size": 128},
        "serve": {"max_running_requests": 128},
    }
    assert 43_000 < decode_rate(H200, {**SMOLLM2, "weight_bytes": 269_000_000}, 128, **on_gpu) < 87_000


def test_83288_answers_of_a_trillion_parameters_take_days_on_eight_gpus():
    """The first users' figure is 24 to 55 hours."""
    params = Params.model_validate(
        {
            "target": {"device": "cuda", "dtype": "bfloat16"},
            "regenerate": {"engine": "sglang", "batch_size": 64, "max_new_tokens": 2048},
            "serve": {"max_running_requests": 64, "extra_args": ["--tp-size", "8"]},
        }
    )
    load = Workload.of(params, [PromptSource("a.jsonl", "train", 83_288, 83_288 * 300)])
    stages = {e.stage: e for e in estimate(params, load, TargetFacts.model_validate(KIMI), H200)}
    hours = stages["regenerate_responses"].seconds / 3600
    assert 12 < hours < 110
    assert stages["regenerate_responses"].gpu_hours == pytest.approx(8 * hours)
