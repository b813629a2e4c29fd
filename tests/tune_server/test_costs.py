"""What a batch will take, by what starts and answers took so far; never less than can be known."""

import pytest

from tasks.tune_server.candidates import PLAIN, Candidate, Shape
from tasks.tune_server.costs import REPEATS, Costs

FAST, NEW = Candidate(Shape(3, 1, 4)), Candidate(Shape(5, 4, 8))


def costs(starts_together: bool) -> Costs:
    made = Costs(starts_together)
    made.started(3, 60.0)
    made.answered(PLAIN, 0.5)
    made.answered(FAST, 0.2)
    return made


@pytest.mark.parametrize(("servers", "seconds"), [(0, 0.0), (1, 60.0), (3, 60.0), (6, 120.0)])
def test_servers_that_start_together_take_the_time_of_the_slowest_and_more_of_them_longer(servers, seconds):
    assert costs(True).batch(servers, [], 4) == pytest.approx(seconds)


@pytest.mark.parametrize(("servers", "seconds"), [(0, 0.0), (1, 20.0), (3, 60.0), (6, 120.0)])
def test_servers_that_start_in_turn_take_their_time_each(servers, seconds):
    assert costs(False).batch(servers, [], 4) == pytest.approx(seconds)


def test_the_first_start_on_a_fresh_host_is_no_measure_of_later_ones():
    made = Costs(False)
    for servers, seconds in ((2, 400.0), (2, 40.0), (1, 30.0), (1, 20.0)):
        made.started(servers, seconds)
    assert made.batch(3, [], 4) == pytest.approx(60.0)


def test_each_server_is_asked_all_questions_in_every_repeat():
    assert costs(True).batch(0, [PLAIN, FAST], 4) == pytest.approx(REPEATS * 4 * 0.7)


def test_a_server_never_asked_is_taken_to_be_as_slow_as_the_slowest():
    assert costs(True).batch(0, [NEW], 4) == pytest.approx(REPEATS * 4 * 0.5)


def test_until_something_was_started_and_asked_nothing_is_known():
    made = Costs(True)
    assert not made.are_known
    made.started(0, 3.0)
    made.answered(PLAIN, 0.5)
    assert not made.are_known
    made.started(2, 3.0)
    assert made.are_known
