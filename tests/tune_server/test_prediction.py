"""What is known of servers that were never started: bounds that hold, and none where too little was measured."""

from dataclasses import replace

import pytest

from tasks.tune_server.candidates import Candidate, Option, Shape
from tasks.tune_server.prediction import Prediction
from tasks.tune_server.results import Trial
from tests.tune_server.bench import PLAIN_STEP_S, Bench, round_s


def measured(*shapes: Shape, ratio: float = 0.5) -> Prediction:
    bench, trials = Bench(ratio=ratio), []
    for shape in shapes:
        trial = Trial(Candidate(shape))
        trial.results.append(bench._result(trial.candidate, 4, 0))
        trials.append(trial)
    return Prediction(trials)


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_two_chains_tell_the_speed_of_all(steps):
    shape = Shape.chain(steps)
    found = measured(Shape.chain(3), Shape.chain(5)).speedup(shape)
    assert found == pytest.approx(Bench(ratio=0.5).speedup(Candidate(shape)))


def test_acceptance_is_that_of_the_longest_chain_which_says_most():
    found = measured(Shape.chain(2), Shape.chain(5))
    trials = [Trial(Candidate(shape), [result]) for shape, result in found.measured.items()]
    trials[0].results[0] = replace(trials[0].results[0], survival=(0.9, 0.8))
    assert Prediction(trials).accept_length(Shape.chain(3)) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_a_setting_beside_the_numbers_tells_nothing_of_the_numbers_alone():
    found = measured(Shape.chain(3), Shape.chain(5))
    trials = [Trial(Candidate(shape), [result]) for shape, result in found.measured.items()]
    with_setting = Candidate(Shape.chain(5), (Option("triton", "attention backend"),))
    slower = replace(found.measured[Shape.chain(5)], break_even=100.0)
    assert Prediction([*trials, Trial(with_setting, [slower])]).round_time == found.round_time


def test_no_round_is_predicted_shorter_than_a_plain_step():
    found = measured(Shape.chain(3), Shape.chain(5))
    short = replace(found.measured[Shape.chain(3)], break_even=1.1)
    trials = [Trial(Candidate(shape), [result]) for shape, result in found.measured.items()]
    trials[0].results[0] = short
    assert Prediction(trials).speedup(Shape.chain(1)) == pytest.approx(1.5)


def test_one_chain_tells_nothing_since_the_time_of_a_step_is_open():
    found = measured(Shape.chain(3), Shape(5, 4, 8))
    assert found.speedup(Shape.chain(2)) is None
    assert found.ruled_out(Candidate(Shape.chain(2))) is None


def test_a_tree_is_bounded_by_a_measured_one_that_holds_all_its_nodes():
    found = measured(Shape.chain(3), Shape.chain(5), Shape(4, 4, 16))
    known = found.measured[Shape(4, 4, 16)].accept_length
    assert found.accept_length(Shape(4, 4, 8)) == pytest.approx(known)
    assert found.accept_length(Shape(5, 4, 8)) > known


@pytest.mark.parametrize("shape", [Shape(3, 4, 16), Shape(4, 4, 32), Shape(4, 2, 8)])
def test_of_a_tree_with_other_nodes_only_its_depth_is_a_bound(shape):
    found = measured(Shape.chain(3), Shape.chain(5), Shape(4, 4, 16))
    assert found.accept_length(shape) == shape.steps + 1


def test_a_bound_well_behind_the_best_rules_out():
    found = measured(Shape.chain(1), Shape.chain(5), ratio=0.05)
    assert found.ruled_out(Candidate(Shape.chain(7)))
    bound = found.speedup(Shape.chain(7))
    assert f"at best {bound:.2f} times" in found.ruled_out(Candidate(Shape.chain(7)))


def test_nothing_is_ruled_out_by_what_noise_could_explain():
    found = measured(Shape.chain(3), Shape.chain(5), ratio=0.7)
    best = max(result.decoding_speedup for result in found.measured.values())
    close = [steps for steps in range(1, 8) if found.speedup(Shape.chain(steps)) > 0.95 * best]
    assert len(close) > 2
    assert all(found.ruled_out(Candidate(Shape.chain(steps))) is None for steps in close)


def test_nothing_is_ruled_out_by_what_the_repeats_themselves_vary():
    found = measured(Shape.chain(1), Shape.chain(5), ratio=0.05)
    (best, result), _ = found.measured.items()
    wild = Trial(
        Candidate(best), [replace(result, ratios=(0.1 * result.speedup, result.speedup, 1.9 * result.speedup))]
    )
    others = [Trial(Candidate(shape), [of]) for shape, of in found.measured.items() if shape != best]
    assert found.ruled_out(Candidate(Shape.chain(7)))
    assert Prediction([wild, *others]).ruled_out(Candidate(Shape.chain(7))) is None


@pytest.mark.parametrize("error", [0.9, float("inf")])
def test_nothing_is_ruled_out_by_what_the_questions_vary(error):
    found = measured(Shape.chain(1), Shape.chain(5), ratio=0.05)
    trials = [Trial(Candidate(shape), [replace(of, accept_error=error)]) for shape, of in found.measured.items()]
    assert found.ruled_out(Candidate(Shape.chain(7)))
    assert Prediction(trials).ruled_out(Candidate(Shape.chain(7))) is None


def test_the_line_is_through_the_rounds_of_the_chains():
    found = measured(Shape.chain(2), Shape.chain(6), Shape(5, 4, 8)).round_time
    assert found.at(4) == pytest.approx(round_s(Shape.chain(4)) / PLAIN_STEP_S)
    assert found.step == pytest.approx(0.2)


def test_a_tree_like_a_measured_one_is_started_before_one_that_is_only_deep():
    found = measured(Shape.chain(3), Shape.chain(7), Shape(5, 4, 8), ratio=0.2)
    assert found.likely(Candidate(Shape(2, 4, 8))) > found.likely(Candidate(Shape(6, 8, 32)))
