"""What a round costs and yields by its number of draft steps, and what follows for somebody whose draft does not pay."""

import pytest

from tasks.common.break_even import (
    RoundTime,
    accept_length_at,
    advice,
    predicted_speedup,
    prolonged,
)

SURVIVAL = (0.6, 0.3, 0.15, 0.09, 0.06)


# --- acceptance


def test_acceptance_at_fewer_steps_is_one_and_the_survivals_so_far():
    assert accept_length_at(SURVIVAL, 5) == pytest.approx(2.2)
    assert accept_length_at(SURVIVAL, 2) == pytest.approx(1.9)


def test_fewer_steps_of_a_walk_of_chains_are_counted_as_if_each_round_were_cut_there():
    correct = [0, 0, 1, 3, 2, 5, 1, 0, 4, 2]
    survival = [sum(c >= i for c in correct) / len(correct) for i in range(1, 6)]
    for steps in range(1, 6):
        cut = [min(c, steps) for c in correct]
        assert accept_length_at(survival, steps) == pytest.approx(1 + sum(cut) / len(cut))


def test_more_steps_than_were_measured_are_no_measurement():
    with pytest.raises(ValueError, match="5 positions says nothing of 6"):
        accept_length_at(SURVIVAL, 6)


def test_a_longer_chain_is_prolonged_by_the_last_ratio():
    assert prolonged((0.8, 0.4), 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert prolonged((0.5,), 3) == pytest.approx([0.5, 0.25, 0.125])
    assert prolonged(SURVIVAL, 2) == [0.6, 0.3]


def test_where_nothing_survived_nothing_survives_further():
    assert prolonged((0.2, 0.0, 0.0), 5) == [0.2, 0.0, 0.0, 0.0, 0.0]


# --- time


def test_two_lengths_of_a_round_give_what_a_step_takes():
    time = RoundTime.through({3: 3.4, 5: 4.0})
    assert (time.fixed, time.step) == pytest.approx((2.5, 0.3))
    assert time.at(2) == pytest.approx(3.1)
    assert time.step_share(5) == pytest.approx(0.3 / 4.0)


def test_more_lengths_are_fitted_by_least_squares():
    time = RoundTime.through({1: 2.0, 2: 3.2, 3: 3.8})
    assert (time.fixed, time.step) == pytest.approx((1.2, 0.9))


def test_one_length_leaves_open_what_a_step_takes():
    assert RoundTime.through({3: 3.4}) is None


def test_a_longer_round_that_took_less_time_is_noise():
    time = RoundTime.through({3: 3.4, 5: 3.0})
    assert (time.fixed, time.step) == pytest.approx((3.2, 0.0))


def test_a_round_of_no_steps_takes_no_less_than_no_time():
    time = RoundTime.through({3: 1.0, 5: 3.0})
    assert (time.fixed, time.step) == pytest.approx((0.0, 18 / 34))


def test_a_round_pays_for_the_plain_steps_that_it_replaces():
    assert predicted_speedup(2.6, round_time=3.9, plain_step=1.5) == pytest.approx(1.0)
    assert predicted_speedup(3.9, round_time=3.9, plain_step=1.5) == pytest.approx(1.5)


# --- advice


def test_a_draft_below_break_even_is_told_what_fewer_steps_would_need_and_reach():
    said = advice(2.2, SURVIVAL, 5, 2.6, draft_step_share=0.08)
    # 2 steps: 2.6 * (1 - 3 * 0.08) = 1.976 needed, 1 + 0.6 + 0.3 reached.
    assert said[0].startswith("You need 2.60, you have 2.20: ")
    assert "0.85 times as fast as without" in said[0]
    assert (
        said[1] == "2 draft steps instead of 5 would need 1.98 and reach 1.90: 0.96 times as fast as without the draft."
    )


def test_fewer_steps_that_cost_as_much_are_not_advised():
    said = advice(2.2, SURVIVAL, 5, 2.6, draft_step_share=0.001)
    assert said[1].startswith(
        "Fewer draft steps would not help: 4 draft steps instead of 5 would need 2.60 and reach 2.14"
    )


def test_no_round_is_shorter_than_a_plain_step():
    said = advice(2.2, SURVIVAL, 5, 2.6, draft_step_share=0.2)
    assert said[1].startswith("2 draft steps instead of 5 would need 1.04 and reach 1.90")
    assert "2 draft steps instead of 5 would need 1.00 and" in advice(2.2, SURVIVAL, 5, 2.0, draft_step_share=0.2)[1]


def test_without_the_time_of_a_step_nothing_is_promised():
    (_, said, _) = advice(2.2, SURVIVAL, 5, 2.6)
    assert "not known" in said and "tasks.tune_server" in said


def test_a_report_that_cannot_be_read_is_why_fewer_steps_are_not_judged():
    (_, said, _) = advice(2.2, SURVIVAL, 5, 2.6, draft_step_share="reports/tuned.json: not valid JSON.")
    assert said == "Whether fewer draft steps would pay more is not known: reports/tuned.json: not valid JSON."


def test_of_a_tree_survival_says_nothing_about_fewer_steps():
    assert not any(
        "draft step" in sentence for sentence in advice(2.2, SURVIVAL, 5, 2.6, topk=4, draft_step_share=0.08)
    )


def test_a_draft_that_pays_is_told_so_and_asked_for_no_data():
    said = advice(3.0, (0.9, 0.7, 0.4), 3, 2.5, draft_step_share=0.05)
    assert said[0] == "You need 2.50, you have 3.00: the draft pays, decoding is 1.20 times as fast."
    assert not any("data" in sentence for sentence in said)


def test_data_is_asked_for_by_the_scaling_fit_alone():
    assert "needs a scaling fit" in advice(2.1, (0.6, 0.5), 2, 2.6)[-1]
    said = advice(2.1, (0.6, 0.5), 2, 2.6, scaling={"tokens": 3e6, "accept_length_per_doubling": 0.2})[-1]
    assert "a doubling adds 0.20" in said and "about 8 times the 3.0 M tokens" in said
    assert (
        "does not help"
        in advice(2.1, (0.6, 0.5), 2, 2.6, scaling={"tokens": 3e6, "accept_length_per_doubling": 0.0})[-1]
    )


@pytest.mark.parametrize("scaling", [None, {"tokens": 3e6, "accept_length_per_doubling": 0.2}])
def test_a_break_even_above_all_that_a_round_can_yield_is_out_of_reach_of_any_data(scaling):
    said = advice(2.1, (0.6, 0.5), 2, 3.01, scaling=scaling)[-1]
    assert said.startswith("3.01 cannot be reached with 2 draft steps")
    assert "cannot be reached" not in advice(2.1, (0.6, 0.5), 2, 3.0, scaling=scaling)[-1]


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"tokens": 3e6},
        {"accept_length_per_doubling": 0.2},
        {"tokens": 3e6, "accept_length_per_doubling": "0.2"},
        {"tokens": 3e6, "accept_length_per_doubling": float("nan")},
        {"tokens": 0, "accept_length_per_doubling": 0.2},
        {"tokens": 10**400, "accept_length_per_doubling": 0.2},
        {"tokens": True, "accept_length_per_doubling": 0.2},
        [],
    ],
)
def test_a_scaling_file_without_its_numbers_is_named_and_the_rest_of_the_advice_stays(scaling):
    first, *_, last = advice(2.1, (0.6, 0.5), 2, 2.6, scaling=scaling)
    assert first.startswith("You need 2.60")
    assert (
        "not known: reports/scaling.json must be JSON with the numbers `accept_length_per_doubling` and `tokens`"
        in last
    )


@pytest.mark.parametrize("gain", [0.01, 1e-5, 1e-320])
def test_a_gain_that_would_need_data_beyond_all_fits_is_said_to_be_that_small(gain):
    said = advice(2.1, (0.6, 0.5), 2, 2.6, scaling={"tokens": 3e6, "accept_length_per_doubling": gain})[-1]
    assert "more than 1024 times the 3.0 M tokens" in said
