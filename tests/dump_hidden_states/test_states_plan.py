"""The server with hooks as it is planned: what it cannot be started with, and which GPU and port a rank has."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.ring import bounded
from tasks.common.shard_layout import ShardPlan
from tasks.common.target import target_contract
from tasks.dump_hidden_states.engines import on_this_gpu
from tasks.dump_hidden_states.sglang_engine import HookedServer
from tasks.dump_hidden_states.spool import ERROR
from tasks.dump_hidden_states.states_plan import require_fits, require_hooks, states_plan


@pytest.fixture
def make_plan(project, tiny_params):
    def make(*words: str):
        params = tiny_params(serve={"context_length": 128, "extra_args": list(words)})
        return states_plan(params, target_contract(params.contract), Path("spool"))

    return make


def test_hooks_name_each_aux_layer_and_the_decoder(make_plan):
    said = {flag.name: flag.values for flag in make_plan().flags}
    named = [hook["target_modules"][0] for hook in json.loads(said["--forward-hooks"][0])]
    assert named == ["model.layers.1", "model.layers.3", "model.layers.4", "model"]
    assert said["--disable-radix-cache"] == ()
    assert said["--cuda-graph-backend-prefill"] == ("disabled",)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--dp", "run several ranks"),
        ("--data-parallel", "run several ranks"),
        ("--pipeline-par=2", "no rank sees all layers"),
        ("--enable-mixed", "decoding requests stand between"),
        ("--enable-two-batch-overlap", "two halves"),
        ("--enable-single-batch-overlap", "beside each other"),
        ("--enable-pdmux", "split by layers"),
        ("--disaggregation-mode=prefill", "servers of their own"),
        ("--nnodes", "files of one host"),
        ("--attn-cp-size", "spread over ranks"),
        ("--attention-context-parallel-size", "spread over ranks"),
        ("--moe-dp-size", "spread over ranks"),
        ("--moe-data-parallel-size", "spread over ranks"),
        ("--allow-auto", "lose its end"),
        ("--config", "cannot be checked"),
        ("--forward-hooks", "the dump's own"),
        ("--cuda-graph-backend-prefill", "a graph is replayed"),
    ],
)
def test_what_hooks_cannot_work_with_is_refused_by_its_beginning_too(make_plan, word, reason):
    with pytest.raises(
        DraftlineError, match=f"extra_args holds {word.partition('=')[0]}, with which states .*{reason}"
    ):
        make_plan(word, "2")


@pytest.mark.parametrize("words", [("--load-format", "dummy"), ("--load-form=dummy",)])
def test_random_weights_are_refused_and_other_ways_to_load_are_not(make_plan, words):
    with pytest.raises(DraftlineError, match="--load-format dummy: states of random weights"):
        make_plan(*words)
    assert make_plan("--load-format", "safetensors", "--served-model-name", "dummy")


def test_a_sample_that_the_server_cannot_take_is_named():
    """SGLang refuses what is as long as its limit."""
    info = {"max_req_input_len": 122, "context_length": 128, "max_total_num_tokens": 2048}
    require_fits(info, 121, "train-7")
    with pytest.raises(
        DraftlineError, match=r"sample train-7 has 122 tokens.*context_length 128 with 2048 tokens of cache takes 121\."
    ):
        require_fits(info, 122, "train-7")


def test_other_flags_pass(make_plan):
    assert "--attention-backend" in [flag.name for flag in make_plan("--attention-backend", "triton").flags]


def test_a_server_that_runs_without_hooks_is_refused():
    with pytest.raises(
        DraftlineError, match="disable_radix_cache is False, planned True; forward_hooks is 0, planned 4"
    ):
        require_hooks({"disable_radix_cache": False, "cuda_graph_backend_prefill": "disabled"}, 4)


@pytest.mark.parametrize(
    ("device", "local", "words", "expected"),
    [
        ("cpu", 3, [], "cpu"),
        ("cuda", 0, [], "cuda"),
        ("cuda", 3, [], "cuda:3"),
        ("cuda", 3, ["--tp-size=2"], "cuda:6"),
        ("cuda:0", 3, [], "cuda:3"),
        ("cuda:4", 1, ["--tp", "2"], "cuda:6"),
    ],
)
def test_each_rank_of_a_host_has_gpus_of_its_own(monkeypatch, device, local, words, expected):
    monkeypatch.setenv("LOCAL_RANK", str(local))
    params = Params.model_validate(
        {"target": {"device": device}, "dump": {"engine": "sglang"}, "serve": {"port": 30000, "extra_args": words}}
    )
    placed = on_this_gpu(params)
    assert (placed.target.device, placed.serve.port) == (expected, 30000 + 2 * local)


def shards(count: int) -> list[ShardPlan]:
    return [ShardPlan.of(f"shard-{n:05d}", "plan", [("s", [1, 2], [1, 1])]) for n in range(count)]


@pytest.fixture
def spool(tmp_path):
    (tmp_path / "spool").mkdir()
    return tmp_path / "spool"


def test_a_server_that_dies_while_the_ring_is_full_ends_the_dump(tmp_path, spool):
    def refuse(*_):
        raise DraftlineError("no answer")

    compute = HookedServer(SimpleNamespace(prefill=refuse), spool)
    with pytest.raises(DraftlineError, match="no answer"):
        list(compute(tmp_path, bounded(tmp_path, shards(4), 2, patience_s=60)))


def test_a_server_that_dies_after_it_has_answered_ends_the_dump(tmp_path, spool):
    def dead():
        raise DraftlineError("the states server died.")

    server = SimpleNamespace(prefill=lambda *_: None, require_alive=dead)
    with pytest.raises(DraftlineError, match="the states server died"):
        list(HookedServer(server, spool)(tmp_path, shards(1)))


def test_a_server_that_dies_of_what_its_hooks_say_is_not_asked_for_the_cause(tmp_path, spool):
    def died(*_):
        (spool / ERROR).write_text("DraftlineError: the disk is full.")
        raise DraftlineError("no answer: Connection aborted")

    with pytest.raises(
        DraftlineError, match=r"shard-00000: the server's hooks failed: DraftlineError: the disk is full"
    ):
        list(HookedServer(SimpleNamespace(prefill=died), spool)(tmp_path, shards(1)))


def test_a_shard_that_is_freed_before_it_is_seen_is_through(tmp_path, spool):
    def consumed_at_once(*_):
        (tmp_path / "shard-00000.freed").write_text('{"plan_sha256": "plan"}')

    server = SimpleNamespace(prefill=consumed_at_once, require_alive=lambda: time.sleep(0))
    assert [shard.name for shard in HookedServer(server, spool)(tmp_path, shards(1))] == ["shard-00000"]


def test_hooks_that_match_no_module_are_found_before_the_first_shard(tmp_path, spool, monkeypatch):
    monkeypatch.setattr("tasks.dump_hidden_states.sglang_engine._PROOF_TIMEOUT_S", 0)
    (tmp_path / "log").write_text("INFO\nNo modules matched hook spec 'slot 0, layer 1' patterns=['model.layers.1']\n")
    server = SimpleNamespace(prefill=lambda *_: None, require_alive=lambda: None, log=tmp_path / "log")
    with pytest.raises(DraftlineError, match=r"(?s)hooks do not write.*No modules matched hook spec 'slot 0, layer 1'"):
        HookedServer(server, spool).prove_hooks()
