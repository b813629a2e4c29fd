"""What a candidate starts: the parameters' own plan with its numbers and settings, and nothing else changed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.target import target_contract
from tasks.tune_server.candidates import PLAIN, Candidate, Option, Shape
from tests.random_draft import write_random_draft

PORT = 31_400
RING = Option("ring", "all-reduce", ("--disable-custom-all-reduce",), (("NCCL_ALGO", "Ring"),))
FEWER = Option("at most 2", "batch limit", max_running_requests=2)


@pytest.fixture
def params(project, tiny_params) -> Params:
    made = tiny_params(
        contract={"aux_layer_ids": [1, 3, 4]},
        serve={"context_length": 512, "extra_args": ["--stream-interval", "2"], "environment": {"NCCL_DEBUG": "WARN"}},
    )
    write_random_draft(Path("artifacts/export"), target_contract(made.contract))
    return made


def said(plan) -> dict[str, str]:
    return {setting.name: " ".join(setting.values) for setting in (*plan.environment, *plan.flags)}


def test_a_shape_is_served_with_its_three_numbers(params):
    words = said(Candidate(Shape(5, 4, 8)).plan(params, PORT))
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    assert [words[f"--speculative-{name}"] for name in names] == ["5", "4", "8"]
    assert words["--port"] == str(PORT)


def test_the_automatic_choice_is_started_without_numbers(params):
    chosen, given = (said(Candidate(Shape(5, 4, 8), (), auto).plan(params, PORT)) for auto in (True, False))
    numbers = {name: value for name, value in given.items() if name not in chosen}
    assert list(numbers.values()) == ["5", "4", "8"]
    assert chosen.items() <= given.items()


@pytest.mark.parametrize("shape", [None, Shape.chain(2)])
def test_settings_come_on_top_of_those_of_the_parameters_with_a_draft_and_without(params, shape):
    words = said(Candidate(shape, (RING, FEWER)).plan(params, PORT))
    assert words["--stream-interval"] == "2"
    assert "--disable-custom-all-reduce" in words
    assert (words["NCCL_DEBUG"], words["NCCL_ALGO"]) == ("WARN", "Ring")
    assert words["--max-running-requests"] == "2"
    assert ("--speculative-algorithm" in words) == (shape is not None)


def test_without_settings_the_plain_server_is_the_benchmarks(params):
    from tasks.common.server_plan import baseline_plan

    assert PLAIN.plan(params, PORT) == baseline_plan(params, port=PORT)


def test_a_broken_export_is_refused_as_ever(params):
    Path("artifacts/export/config.json").unlink()
    with pytest.raises(DraftlineError):
        Candidate(Shape(3, 1, 4)).plan(params, PORT)


def test_names_tell_candidates_apart():
    assert Candidate(Shape(5, 4, 8), (), True).name == "5/4/8 (automatic)"
    assert Candidate(Shape(3, 1, 4), (RING, FEWER)).name == "3/1/4 + ring + at most 2"
    assert PLAIN.name == "plain server"


_SHAPES = (Shape(3, 1, 4), Shape(5, 4, 8), Shape(7, 8, 64))
_SGLANG_RESERVES = """
import sys
from sglang.srt.managers import utils

class Algorithm:
    speculative_algorithm = "EAGLE3"

utils.get_spec = lambda: Algorithm
for shape in sys.argv[1:]:
    Algorithm.speculative_num_steps, Algorithm.speculative_eagle_topk, tokens = map(int, shape.split("/"))
    utils.max_speculative_num_draft_tokens = lambda: tokens
    print("reserved", utils.compute_num_reserved_tokens())
"""


def test_room_for_a_round_is_kept_as_sglang_keeps_it():
    """In a process of its own: SGLang's import declares operators, which this one may hold already."""
    shapes = map(str, _SHAPES)
    done = subprocess.run(
        [sys.executable, "-c", _SGLANG_RESERVES, *shapes], capture_output=True, text=True, timeout=120
    )
    reserved = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("reserved ")]
    assert reserved == [shape.reserved for shape in _SHAPES], done.stderr
