"""A baseline under other conditions is refused: its speed-up would be made by the flags (S6)."""

import pytest

from tasks.benchmark.conditions import require_equal_conditions, require_equal_environments, shown
from tasks.common.errors import DraftlineError
from tasks.common.server_plan import flag
from tests.benchmark.passes import load

PLAIN = {
    "port": 1,
    "random_seed": 5,
    "launch_command": "--port 1",
    "startup_time": {"load_weight": 4.9},
    "speculative_algorithm": None,
    "disable_cuda_graph": False,
    "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 64, "bs": [1, 2, 4]}},
    "max_total_num_tokens": 598885,
    "max_running_requests": 64,
}
DRAFTED = PLAIN | {
    "port": 2,
    "random_seed": 6,
    "launch_command": "--port 2 --speculative-algorithm EAGLE3",
    "startup_time": {"load_weight": 7.8},
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 64, "bs": [1, 2, 3, 4]}},
    "max_total_num_tokens": 500000,
}
LOADS = [load(4, concurrency=4)]


def require(drafted, plain=PLAIN, loads=LOADS):
    require_equal_conditions({"baseline": plain, "speculative": drafted}, loads, reserved=4)


def test_what_speculation_itself_changes_may_differ():
    require(DRAFTED)


def on(device: str, plain_off: bool, drafted_off: bool) -> tuple[dict, dict]:
    """Both servers, without overlap scheduling or with it."""
    plain, drafted = ({"device": device, "disable_overlap_schedule": off} for off in (plain_off, drafted_off))
    return PLAIN | plain, DRAFTED | drafted


def test_what_sglang_takes_from_a_server_that_speculates_on_a_cpu_the_plain_one_keeps_and_the_report_says_so():
    plain, drafted = on("cpu", False, True)
    require(drafted, plain=plain)
    said = shown({"baseline": plain, "speculative": drafted})
    assert said["overlap_schedule"].startswith("on the plain server alone")


@pytest.mark.parametrize(("device", "plain_off"), [("cuda", False), ("cuda", True), ("cpu", True)])
def test_on_a_gpu_or_the_other_way_round_that_is_a_difference_like_any(device, plain_off):
    plain, drafted = on(device, plain_off, not plain_off)
    with pytest.raises(DraftlineError, match=f"disable_overlap_schedule is {plain_off} and {not plain_off}"):
        require(drafted, plain=plain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"disable_cuda_graph": True}, "disable_cuda_graph is False and True"),
        ({"max_running_requests": 48}, "max_running_requests is 64 and 48"),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 64}}}, "cuda_graph_config.decode.backend"),
        ({"a_flag_of_a_later_release": 1}, "a_flag_of_a_later_release is None and 1"),
    ],
)
def test_any_other_difference_is_refused_and_named(change, named):
    with pytest.raises(DraftlineError, match="same conditions") as refused:
        require(DRAFTED | change)
    assert named in str(refused.value)


def test_a_baseline_with_graphs_off_is_refused_too():
    with pytest.raises(DraftlineError, match="disable_cuda_graph is True and False"):
        require(DRAFTED, plain=PLAIN | {"disable_cuda_graph": True})


def test_a_cache_in_which_requests_would_wait_is_refused():
    with pytest.raises(DraftlineError, match=r"holds 200 tokens, and 4 requests at once .* can come to hold 284"):
        require(DRAFTED | {"max_total_num_tokens": 200})


def test_a_variable_in_one_arm_alone_is_refused():
    plain = (flag("HF_HUB_OFFLINE", "1", reason=""),)
    require_equal_environments({"baseline": plain, "speculative": plain})
    slower = (*plain, flag("OMP_NUM_THREADS", "1", reason=""))
    with pytest.raises(DraftlineError, match="OMP_NUM_THREADS of the environment differ"):
        require_equal_environments({"baseline": slower, "speculative": plain})


def test_the_report_shows_the_settings_that_matter():
    shared = {"disable_cuda_graph": False, "max_running_requests": 64}
    assert shown({"baseline": PLAIN, "speculative": DRAFTED}) == shared
