"""Which settings are tried: those that the device, the target and params.yaml leave open, and SGLang knows."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.common.params import Params
from tasks.tune_server.options import Device, is_tensor_parallel, open_options

H200 = Device((9, 0), has_flashinfer=True)
B200 = Device((10, 0), has_flashinfer=True)
CPU = Device(None)


def params_with(**serve) -> Params:
    return Params.model_validate({"target": {"device": "cuda"}, "serve": serve, "benchmark": {"concurrency": [1]}})


def names(device: Device, concurrency: int = 1, is_latent: bool = False, **serve) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for option in open_options(params_with(**serve), concurrency, device, is_latent)[0]:
        found.setdefault(option.group, []).append(option.name)
    return found


def flags_of_all() -> set[str]:
    multicast = Device((9, 0), True, multicast=True)
    options = [*open_options(params_with(extra_args=["--tp-size", "2"]), 4, multicast)[0]]
    return {word for option in options for word in option.flags if word.startswith("--")}


# Read in srt/server_args.py of the wheel of SGLang 0.5.16; another version may be installed here.
IN_0_5_16 = {
    "--attention-backend",
    "--cuda-graph-backend-prefill",
    "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs-decode",
    "--disable-cuda-graph-padding",
    "--disable-custom-all-reduce",
    "--enable-nccl-nvls",
    "--enable-symm-mem",
    "--speculative-draft-attention-backend",
}


def test_no_flag_is_tried_that_was_not_read_in_the_oldest_sglang_as_well():
    assert flags_of_all() == IN_0_5_16


@pytest.mark.parametrize("flag", sorted(flags_of_all()))
def test_the_installed_sglang_has_every_flag_that_is_tried(flag):
    (folder,) = find_spec("sglang").submodule_search_locations
    arguments = Path(folder) / "srt"
    sources = [arguments / "server_args.py", *(arguments / "arg_groups").glob("fields/**/*.py")]
    field = flag.removeprefix("--").replace("-", "_")
    assert any(f"    {field}: A[" in source.read_text() for source in sources)


def test_attention_backends_are_those_of_the_gpu():
    assert names(H200)["attention backend"] == ["triton", "flashinfer", "fa3", "fa3, the draft on triton"]
    assert names(B200)["attention backend"] == ["triton", "flashinfer", "trtllm_mha"]
    assert names(Device((8, 9)))["attention backend"] == ["triton", "fa3", "fa3, the draft on triton"]


def test_a_cpu_has_one_backend_and_no_graphs():
    assert set(names(CPU)) == {"batch limit"}


def test_a_target_with_latent_attention_keeps_its_own_backends():
    assert "attention backend" not in names(H200, is_latent=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--attention-backend", "triton"],
        ["--decode-attention-backend=fa3"],
        ["--speculative-draft-attention-backend=triton"],
    ],
)
def test_a_backend_that_is_named_is_kept(words):
    options, kept = open_options(params_with(extra_args=words), 1, H200)
    assert not any(option.group == "attention backend" for option in options)
    assert kept == [f"attention backend: kept as params.yaml names it ({words[0]})."]


def test_graphs_that_are_named_are_kept():
    found = names(H200, extra_args=["--cuda-graph-max-bs-decode", "16"])
    assert found.keys().isdisjoint({"decode graphs", "prefill graphs"})


def test_graphs_are_captured_for_the_requests_that_count():
    assert "graphs of 1 and 6 requests" in names(H200, 6)["decode graphs"]
    assert "graphs of 1 request" in names(H200, 1)["decode graphs"]


def graphs(concurrency: int, asked: list[int], limit: int) -> list[tuple[str, ...]]:
    params = Params.model_validate(
        {
            "target": {"device": "cuda"},
            "serve": {"max_running_requests": limit},
            "benchmark": {"concurrency": asked},
        }
    )
    options, _ = open_options(params, concurrency, H200)
    return [o.flags for o in options if o.group == "decode graphs" and o.flags != ("--disable-cuda-graph-padding",)]


def test_graphs_stay_for_all_that_the_benchmark_asks_of_the_plan():
    assert graphs(1, [4, 16, 64], 128) == [
        ("--cuda-graph-bs-decode", "1", "4", "16", "64"),
        ("--cuda-graph-max-bs-decode", "64"),
    ]
    assert graphs(2, [1], 8) == [("--cuda-graph-bs-decode", "1", "2"), ("--cuda-graph-max-bs-decode", "2")]


def test_graphs_that_sglang_captures_on_its_own_are_no_other_candidate():
    assert graphs(1, [1, 64], 64) == [("--cuda-graph-bs-decode", "1", "64")]
    assert graphs(1, [1], 1) == graphs(1, [1, 2], 2) == []


@pytest.mark.parametrize(
    ("concurrency", "limit", "expected"),
    [(1, 8, [1, 2]), (4, 8, [4]), (4, 64, [4, 8]), (8, 8, [16])],
)
def test_batch_limits_go_upwards_from_the_requests_that_count(concurrency, limit, expected):
    options, _ = open_options(params_with(max_running_requests=limit), concurrency, CPU)
    assert [option.max_running_requests for option in options] == expected


def test_batch_limits_leave_room_for_what_the_benchmark_asks():
    params = Params.model_validate({"benchmark": {"concurrency": [1, 4]}})
    options, _ = open_options(params, 1, CPU)
    assert [option.max_running_requests for option in options] == [4]


@pytest.mark.parametrize(("concurrency", "expected"), [(1, []), (64, [128])])
def test_more_slots_than_the_benchmark_fills_are_tried_where_its_most_requests_count(concurrency, expected):
    params = Params.model_validate({"serve": {"max_running_requests": 64}, "benchmark": {"concurrency": [1, 64]}})
    options, _ = open_options(params, concurrency, CPU)
    assert [option.max_running_requests for option in options] == expected


def test_all_reduce_matters_where_layers_are_split():
    assert "all-reduce" not in names(H200)
    assert "all-reduce" not in names(H200, extra_args=["--dp-size", "2"])
    found = names(H200, extra_args=["--tp-size", "2"])["all-reduce"]
    assert {"NCCL", "NCCL, ring, LL", "NCCL, tree, LL", "NCCL, 8 channels"} <= set(found)


def test_nccl_is_what_reduces_wherever_its_settings_are_tried():
    options, _ = open_options(params_with(extra_args=["--tp=2"]), 1, H200)
    of_nccl = [option for option in options if option.environment]
    assert of_nccl and all("--disable-custom-all-reduce" in option.flags for option in of_nccl)


def test_nvlink_multicast_is_left_to_those_who_ask_for_it():
    extra = ["--tp-size", "2"]
    assert not any("NVLS" in name for name in names(H200, extra_args=extra)["all-reduce"])
    assert "NCCL with NVLS" in names(Device((9, 0), multicast=True), extra_args=extra)["all-reduce"]


def test_nccl_settings_that_are_named_are_kept():
    found = names(H200, extra_args=["--tp-size", "2"], environment={"NCCL_ALGO": "Tree"})
    assert "all-reduce" not in found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tp-size", "2"], True),
        (["--tensor-parallel-size=4"], True),
        (["--tp", "1"], False),
        (["--pp-size", "2"], False),
    ],
)
def test_tensor_parallel_is_read_from_the_flags(words, expected):
    assert is_tensor_parallel(words) is expected
