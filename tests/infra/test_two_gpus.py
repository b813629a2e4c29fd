"""What is measured on two GPUs, as far as a CPU goes: padded heads, processes that end, figures, and real rehearsals."""

import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.gpu import measure_two_gpus, two_gpus_pairs
from infra.gpu.padded_heads import pad_draft, pad_target, padded_heads
from infra.gpu.two_gpus_dump import rates
from infra.gpu.two_gpus_runs import Found, run
from infra.gpu.two_gpus_settings import SIZES
from infra.gpu.two_gpus_table import differs, table
from infra.gpu.two_gpus_train import DDP, FSDP, ONE, RESUMED, speed
from tasks.common.contract import Contract
from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.hidden_states import Sample
from tasks.common.packing import PackedSamples, TttInputs
from tasks.common.params import Params, Target
from tasks.common.served_draft import load_served_draft
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import TARGET, TargetShape, load_causal_lm, load_config, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.export_draft.export import export_config
from tasks.prepare_target.prepare import prepare_target
from tests.ports import free_port_pair

DRAFT_VOCAB = 128


def write_odd_target(folder: Path, tiny_model_folder: Path, bias: bool = False) -> Path:
    """The tiny target with 9 query and 3 key-value heads, as SmolLM2-135M has: two GPUs cannot share them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny_model_folder, folder)
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": bias}
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, **heads))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # else zero
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def write_draft(folder: Path, contract: Contract) -> Path:
    """An exported draft with random weights of the target in artifacts/target."""
    weights = TargetWeights(TARGET) if (TARGET / "model.safetensors").exists() else None
    shape = TargetShape.of(load_config())
    sizes = DraftConfig.of(shape, contract, DRAFT_VOCAB)
    embedding = weights.embed_tokens() if weights else torch.zeros(shape.vocab_size, shape.hidden_size)
    draft = Eagle3Draft(sizes, embedding)
    tensors = {name: torch.randn(tensor.shape) * 0.2 for name, tensor in draft.state_dict().items()}
    target_ids = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[target_ids] = True
    folder.mkdir()
    save_file(tensors | {"d2t": target_ids - torch.arange(DRAFT_VOCAB), "t2d": known}, folder / "model.safetensors")
    write_json(folder / "config.json", export_config(sizes.to_dict(), contract, "float32"))
    write_json(folder / "draftline.json", {"contract": contract.model_dump()})
    return folder


@pytest.fixture
def odd_target(tiny_model_folder, tmp_path, monkeypatch) -> Path:
    """Prepared in artifacts/target of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = write_odd_target(tmp_path / "target", tiny_model_folder)
    prepare_target(Target(model=str(folder)), TARGET)
    return folder


def contract_of(params: Params) -> Contract:
    return target_contract(params.contract)


@pytest.mark.parametrize(
    ("heads", "padded"), [((9, 3), (12, 4)), ((32, 8), (32, 8)), ((6, 1), (12, 2)), ((7, 7), (8, 8))]
)
def test_as_many_query_heads_share_a_key_value_head_as_before(heads, padded):
    assert padded_heads(*heads, parts=2) == padded


@pytest.mark.parametrize("bias", [False, True])
def test_a_target_with_padded_heads_says_what_it_said(tiny_model_folder, tmp_path, bias):
    target = write_odd_target(tmp_path / "target", tiny_model_folder, bias)
    pad_target(target, tmp_path / "padded", 2)
    config = read_json(tmp_path / "padded/config.json")
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (12, 4, 16)
    ids = torch.randint(3, 320, (2, 40))
    with torch.inference_mode():
        said, says = (load_causal_lm(folder, "float32")(ids).logits for folder in (target, tmp_path / "padded"))
    assert (says - said).abs().max() < 1e-5 * said.abs().max()


def test_a_draft_with_padded_heads_reads_as_it_did_and_is_served_with_the_padded_target(odd_target, tmp_path):
    contract = contract_of(Params())
    draft = write_draft(tmp_path / "draft", contract)
    pad_target(odd_target, tmp_path / "padded", 2)
    params = Params.model_validate(
        {"target": {"model": str(tmp_path / "padded")}, "serve": {"context_length": 512, "extra_args": ["--tp-size=2"]}}
    )
    prepare_target(params.target, TARGET)
    pad_draft(draft, tmp_path / "padded_draft", 2, contract_of(params).target_sha256)
    assert speculative_plan(params, tmp_path / "padded_draft").gpus == range(2)

    ids, states = torch.randint(3, 320, (30,)), torch.randn(30, 4, 72)
    sample = Sample("a", ids.int(), torch.ones(30, dtype=torch.uint8), states[:, :3], states[:, 3])
    samples = PackedSamples.of([sample])
    inputs, read = TttInputs.of(samples, 3, "cpu"), []
    for folder in (draft, tmp_path / "padded_draft"):
        own, _ = load_served_draft(Draft.of(DraftFiles.open(folder), "LlamaForCausalLM"), TargetWeights(odd_target))
        read.append(torch.stack(own.unroll(inputs, samples.aux)))
    assert (read[1] - read[0]).abs().max() < 1e-5 * read[0].abs().max()
    assert load_file(tmp_path / "padded_draft/model.safetensors")["midlayer.self_attn.k_proj.weight"].shape[0] == 4 * 16


def test_what_outlives_its_limit_is_ended_with_its_children_in_sessions_of_their_own(tmp_path):
    """As torchrun's processes and servers are."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
    with pytest.raises(DraftlineError, match="ended after 3 s"):
        run([sys.executable, "-c", child], tmp_path, tmp_path / "log", 3)
    pid = int((tmp_path / "log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_fails_is_quoted_and_nothing_that_is_started_uses_multicast(tmp_path):
    code = "import os, sys; sys.exit(' '.join(os.environ[n] for n in ('NCCL_NVLS_ENABLE', 'TORCH_SYMM_MEM_DISABLE_MULTICAST')))"
    with pytest.raises(DraftlineError, match=r"exit code 1: 0 1\n.*log ends with:\n0 1$"):
        run([sys.executable, "-c", code], tmp_path, tmp_path / "log", 60)


def test_what_fails_leaves_its_reason_and_the_next_one_is_measured(tmp_path):
    found = Found(tmp_path / "part.json", time.time() + 60)
    found.attempt("first", lambda: 1 / 0)
    found.attempt("second", lambda: {"tokens_per_s": 7})
    stored = read_json(tmp_path / "part.json")
    assert stored["first"]["failed"] == "ZeroDivisionError: division by zero"
    assert stored["second"]["tokens_per_s"] == 7


def test_the_rate_of_replicas_is_of_the_time_in_which_any_of_them_works():
    def shards(began, *landed):
        return [{"split": "train", "name": "s", "tokens": 100, "began": began, "landed": end} for end in landed]

    warm_up = [{"split": "heldout", "name": "s", "tokens": 900, "began": 0.0, "landed": 9.0}]
    found = rates([warm_up + shards(10.0, 11.0, 12.0), warm_up + shards(11.0, 15.0)])
    assert found == {"tokens_per_s": 60, "tokens_per_s_of_each": [100, 25]}


def readings(*losses: float, step: int = 1, seconds: float = 2.0) -> list[dict]:
    return [
        {"step": step + n, "loss": loss, "tokens": 100, "seconds": seconds * (n + 1)} for n, loss in enumerate(losses)
    ]


def test_speed_is_of_the_steps_between_the_start_and_the_checkpoint():
    sizes = SIZES["cpu"]
    of_run = readings(*[1.0] * sizes.steps)
    of_run[sizes.saved_at - 1]["seconds"] += 100
    of_run[0]["seconds"] -= 1
    assert speed(of_run, sizes) == 50
    assert speed(of_run[sizes.saved_at :], sizes) is None


def test_losses_are_compared_at_steps_that_both_have_against_the_change_between_readings():
    one = readings(8.0, 4.0, 2.0, 1.0)
    assert differs(readings(4.0, 2.2, step=2), one) == (pytest.approx(0.1), 0.5)


def of_run(rate: int | None, *losses: float, processes: int = 2, step: int = 1) -> dict:
    return {
        "tokens_per_s": rate,
        "processes": processes,
        "from_step": step - 1,
        "readings": readings(*losses, step=step),
    }


def test_the_table_holds_every_fact_with_its_verdict_and_the_reason_of_what_failed():
    slot = {"cosine": 0.99995, "lowest_cosine": 0.9, "relative_error": 0.01}
    served = {
        "accept_length": 2.0,
        "tokens_per_s": {"plain": 100.0, "with the draft": 150.0},
        "speed_up": {"median": 1.5, "min": 1.4, "max": 1.6},
        "same_answers": {"plain": 1.0, "with the draft": 0.5},
    }
    idle = {"device": "H200, H200", "seconds": 9, "idle_before": {"0": 0, "1": 0}, "idle_after": {"0": 0, "1": 0}}
    found = {
        "dump": idle
        | {
            "found": {
                "one GPU": {"tokens_per_s": 1000, "shards_of_each": [4]},
                "2 replicas": {"tokens_per_s": 1900, "shards_of_each": [2, 2], "against one GPU": {"last": slot}},
            }
        },
        "train": idle
        | {
            "failed": "ended after 520 s",
            "found": {
                ONE: of_run(1000, 8.0, 4.0, 2.0, processes=1),
                DDP: of_run(1900, 8.001, 4.0),
                FSDP: of_run(1500, 16.0, 4.0),
                RESUMED: {"failed": "DraftlineError: a | b"},
            },
        },
        "serve": idle
        | {
            "not_idle_after": "GPU 1 is not idle",
            "found": {
                two_gpus_pairs.ONE: {"by_concurrency": {"1": served}},
                "tensor parallel 2": {"by_concurrency": {"1": served | {"accept_length": 1.9}}},
            },
        },
    }
    text = table(found)
    for row in (
        "| dump | GPU memory before and after, MiB | 0, 0 | 0, 0 | idle |",
        "| dump | tokens/s, 2 replicas | 1,000 | 1,900 | 1.90 times |",
        "| dump | states, 2 replicas |  | cosine 0.999950, relative error 1.0e-02, the worst slot's | equal |",
        "| dump | shards of each, 2 replicas | 4 | 2, 2 | disjoint |",
        "| train | the part |  |  | **ended after 520 s** |",
        "| train | tokens/s, two with DDP against one process | 1,000 | 1,900 | efficiency 0.95, aim 0.9 reached |",
        "| train | tokens/s, two with FSDP2 against one process | 1,000 | 1,500 | efficiency 0.75, aim 0.9 **missed** |",
        "| train | losses, two with DDP | from one reading to the next 5.0e-01 | off by at most 1.2e-04, steps 1 to 2 | equal within noise |",
        "| train | losses, two with FSDP2 | from one reading to the next 5.0e-01 | off by at most 1.0e+00, steps 1 to 2 | **other losses** |",
        "| train | two with DDP, resumed by one |  |  | **DraftlineError: a / b** |",
        "| serve | GPU memory before and after, MiB | 0, 0 | - | GPU 1 is not idle |",
        "| serve | acceptance length, tensor parallel 2, 1 at once | 2.0 | 1.9 | **more than 2% apart** (-5.00%), 50% of answers the same |",
    ):
        assert row in text.splitlines(), row


def test_two_gpus_are_served_under_every_option_of_the_all_reduce_that_the_tuner_tries(tiny_params):
    params = tiny_params(serve={"extra_args": ["--attention-backend", "triton"]})
    alone, *shared = (way.of(params).serve for way in two_gpus_pairs.ways(params))
    assert alone == params.serve
    assert all(serve.extra_args[2:4] == ("--tp-size", "2") for serve in shared)
    by_sglang, *reduced = shared
    assert by_sglang.extra_args[4:] == ()
    assert len(reduced) >= 4
    assert all(serve.extra_args[4:] == ("--disable-custom-all-reduce",) for serve in reduced)
    assert any(serve.environment.get("NCCL_PROTO") == "LL" for serve in reduced)


@pytest.fixture
def command(monkeypatch, tiny_model_folder, odd_target, tmp_path):
    """`command(part)`: the command's main on a CPU, with the odd target and a draft of it; the part's file."""
    draft = write_draft(tmp_path / "draft", contract_of(Params()))

    def measured(part: str) -> dict:
        paths = {"target": odd_target, "draft": draft, "work": tmp_path / "work", "out": tmp_path / "out"}
        flags = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
        rehearsed = ("--parts", part, "--device", "cpu", "--extra-args", "", "--port", str(free_port_pair()))
        monkeypatch.setattr(sys, "argv", ["", *flags, *rehearsed])
        monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own stay
        measure_two_gpus.main()
        return read_json(tmp_path / "out" / f"{part}.json")

    return measured


@pytest.mark.faults
def test_training_over_two_processes_is_measured(command, tmp_path):
    measured = command("train")
    assert "failed" not in measured, measured
    found = measured["found"]
    assert [run["processes"] for run in found.values()] == [1, 2, 2, 1]
    for name in (DDP, FSDP, RESUMED):
        difference, noise = differs(found[name]["readings"], found[ONE]["readings"])
        assert difference < 1e-5 < noise, name
    assert found[RESUMED]["from_step"] == SIZES["cpu"].saved_at
    assert [reading["step"] for reading in found[ONE]["readings"]] == list(range(1, SIZES["cpu"].steps + 1))
    assert (tmp_path / "out/table.md").read_text().count("equal within noise") == 3


@pytest.mark.faults
def test_dumps_by_two_are_measured(command, tmp_path):
    measured = command("dump")
    assert "failed" not in measured, measured
    one, shared, replicas = measured["found"].values()
    for figures in (shared, replicas):
        assert all(slot["relative_error"] < 1e-4 for slot in figures["against one GPU"].values()), figures
        assert figures["samples"] == one["samples"]
    assert len(replicas["shards_of_each"]) == 2 and 0 not in replicas["shards_of_each"]
    assert sum(replicas["shards_of_each"]) == sum(one["shards_of_each"])
