"""The closed loop: every question asked once, so many at once, and nothing asked after a failure."""

import threading
import time

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.traffic import Load, Question, run_load
from tests.benchmark.passes import completion

QUESTIONS = [Question(str(number), "d", [number]) for number in range(5)]


class Answering:
    """Answers each question with its own token, and notes how many were asked at once."""

    def __init__(self, fails_at: int | None = None):
        self.fails_at, self.lock = fails_at, threading.Lock()
        self.running, self.most, self.asked, self.caches, self.streamed = 0, 0, [], [], 0

    def generate(self, ids, sampling, *, cache_key, stream):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.asked.append(ids[0])
            self.caches.append(cache_key)
            self.streamed += stream
        if ids[0] == self.fails_at:
            raise DraftlineError("the server died")
        time.sleep(0.02)
        with self.lock:
            self.running -= 1
        return completion(list(ids), 0.02)


@pytest.mark.parametrize(("concurrency", "requests", "streams"), [(1, 8, 8), (2, 8, 8), (3, 12, 12), (6, 24, None)])
def test_so_many_at_once_and_at_least_four_requests_each(concurrency, requests, streams):
    server = Answering()
    load = Load.of("set", QUESTIONS, 8, concurrency, 0.0, 4)
    found = run_load(server, load, "arm", repeat=2)
    assert server.most == concurrency
    assert [answer.output_ids[0] for answer in found.answers] == [number % 5 for number in range(requests)]
    assert (found.arm, found.repeat, found.tokens) == ("arm", 2, requests)
    assert len(set(server.caches)) == requests  # a question that is asked again is computed again
    # Of more than four users four read piece by piece.
    assert server.streamed == streams if streams else 0 < server.streamed < requests


def test_cache_room_is_for_the_longest_question_and_the_draft_of_each_user():
    load = Load.of("set", [Question("a", "d", [1] * 10), Question("b", "d", [1])], 2, 3, 0.0, 4)
    assert load.most_tokens(8) == 3 * (10 + 4 + 8)


def test_after_a_failure_nobody_asks_further():
    server = Answering(fails_at=3)
    with pytest.raises(DraftlineError, match="the server died"):
        run_load(server, Load.of("set", QUESTIONS, 40, 2, 0.0, 4), "arm")
    time.sleep(0.1)
    assert len(server.asked) <= 6
