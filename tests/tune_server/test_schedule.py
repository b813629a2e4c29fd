"""What is put into a batch, and how many minutes a search is told to need."""

import re

import pytest

from tasks.tune_server.bench import MeasuredBatch
from tasks.tune_server.candidates import PLAIN
from tasks.tune_server.schedule import Schedule
from tasks.tune_server.search import Search
from tests.tune_server.bench import Bench
from tests.tune_server.test_search import space


def test_of_a_batch_the_first_is_always_one_and_others_that_run_come_before_those_that_do_not():
    bench = Bench(3000, capacity=3)
    schedule = Schedule(bench)
    first, idle, runs = space().shapes[:3]
    schedule.learn([runs], bench.measure([runs], 4, 0, []))
    assert schedule.next_batch([first, idle, runs], 4, 1.0) == [first, runs]


def test_where_none_stays_each_candidate_starts_a_plain_server_of_its_own():
    bench = Bench(88, capacity=1, starts_together=False, start_s=10.0)
    schedule = Schedule(bench)
    one, two = space().shapes[:2]
    schedule.learn([one], MeasuredBatch({}, started=2, start_s=20.0, plain_answer_s=1.0))
    assert schedule.fits([one, two], 4, 1.0)  # 4 starts of 10 s, and 4 servers asked for 12 s each
    bench.clock += 1
    assert not schedule.fits([one, two], 4, 1.0)


def test_a_candidate_that_is_slower_than_the_plain_server_takes_its_own_time():
    bench = Bench(100, ratio=0.05)
    schedule, (deep, *_) = Schedule(bench), space().shapes
    schedule.learn([deep], bench.measure([deep], 4, 0, []))
    bench.clock = 100 - 3 * 4 * 2 * 0.1  # what the two would take as fast as the plain server
    assert not schedule.fits([deep], 4, 1.0)
    bench.clock -= 3 * 4 * 0.2
    assert schedule.fits([deep], 4, 1.0)


def test_as_many_questions_are_asked_as_end_in_time_where_all_takes_a_fifth_longer():
    bench = Bench(1000)
    schedule, (one, *_) = Schedule(bench), space().shapes
    schedule.learn([one], MeasuredBatch({}, started=2, start_s=10.0, plain_answer_s=1.0))
    bench.running = {PLAIN, one}
    bench.clock = 1000 - 1.2 * 3 * 16 * 2  # 16 questions of two servers, three times, a second each
    assert schedule.affordable([one]) == 16
    bench.clock += 1
    assert schedule.affordable([one]) == 8


@pytest.mark.parametrize("capacity", [2, 4])
def test_time_is_left_for_what_is_asked_after_it_with_starts_of_those_that_had_to_make_room(capacity):
    bench = Bench(100, capacity, starts_together=False)
    schedule, (one, two, *_) = Schedule(bench), space().shapes
    schedule.learn([one], MeasuredBatch({}, started=2, start_s=20.0, plain_answer_s=1.0))
    bench.running = {PLAIN, one}
    asked_s = 3 * 4 * 2
    bench.clock = 100 - (10 + asked_s) - 1.2 * (asked_s + 10 * (capacity == 2)) - 0.1
    assert schedule.fits([two], 4, 1.0, [one])
    bench.clock += 1
    assert not schedule.fits([two], 4, 1.0, [one])


def minutes(sentence: str) -> int:
    return int(re.search(r"--minutes (\d+)", sentence)[1])


# Seconds of a start and candidates at once of which 30 s compare all, where servers start together.
ENOUGH = {(10.0, 3), (10.0, 5), (100.0, 5)}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
@pytest.mark.parametrize("start_s", [10.0, 100.0])
def test_the_minutes_that_a_search_is_told_to_need_compare_all(together, capacity, start_s):
    over = space(num_steps=4, num_draft_tokens=5)
    short = Search(over, Bench(30, capacity, together, start_s))
    short.run()
    is_short = not together or (start_s, capacity) not in ENOUGH
    assert bool(short.shortage) == is_short
    if is_short:
        enough = Search(over, Bench(60 * minutes(short.shortage), capacity, together, start_s))
        enough.run()
        assert (enough.has_compared, enough.shortage) == (True, "")
        assert {enough.trials[candidate].last.rung for candidate in over.rows.values()} != {0}


def test_a_search_that_no_server_answered_is_told_what_it_needs_at_least():
    class NeverUp(Bench):
        def measure(self, batch, questions, rung, ranked):
            self.clock += 33
            return MeasuredBatch({}, is_cut=True)

    search = Search(space(), NeverUp(30, starts_together=False))
    search.run()
    assert "within 33 s no server with the draft was up and warm; at least --minutes 2 is needed" in search.shortage
    assert search.shortage.startswith("0.5 minutes are too short to measure 3/1/4, 5/4/8 (automatic), ")


def test_where_the_plain_server_alone_was_up_in_time_the_others_are_not_said_to_have_started():
    class PlainAlone(Bench):
        def measure(self, batch, questions, rung, ranked):
            self.clock += 541
            return MeasuredBatch({}, plain_answer_s=2.0, is_cut=True)

    search = Search(space(), PlainAlone(540))
    search.run()
    assert "within 541 s no server with the draft was up and warm; at least --minutes " in search.shortage


def test_an_answer_that_the_plain_server_was_warmed_up_with_tells_what_would_do():
    class NoWholeRepeat(Bench):
        def measure(self, batch, questions, rung, ranked):
            self.clock += 60
            return MeasuredBatch({}, started=2, start_s=40.0, plain_answer_s=4.0, is_cut=True)

    search = Search(space(), NoWholeRepeat(60, starts_together=False))
    search.run()
    assert "2 servers took 40 s to start, and an answer took 4 s" in search.shortage
    assert minutes(search.shortage) > 60 / 60
