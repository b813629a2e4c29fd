"""From the answers of two servers to what the search is told, and a server that fails among others."""

import math
from dataclasses import replace

import pytest

from tasks.benchmark.figures import Comparison
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Load, Pass, Question
from tasks.tune_server.candidates import PLAIN, Candidate, Shape
from tasks.tune_server.measure import ServerBench, _Asked, result_of
from tasks.tune_server.servers import Budget, OutOfBudget

LOAD = Load("heldout", (Question("q0", "chat", [1]), Question("q1", "chat", [1])), 1, 0.0, 9)
DRAFTED = Candidate(Shape(2, 1, 3))


def answer(tokens: int, seconds: float, first_s: float, histogram: tuple[int, ...] = ()) -> Completion:
    correct = sum(length * count for length, count in enumerate(histogram))
    pieces = ((first_s, 1), (seconds, tokens))
    ids = list(range(tokens))
    return Completion(ids, "", "length", 1, 0, "v", sum(histogram), correct, histogram, None, seconds, pieces)


def made(repeat: int, seconds: float, histogram: tuple[int, ...] = ()) -> Pass:
    """Two answers of 9 tokens each, the first token after a tenth of a second."""
    answers = tuple(answer(9, seconds, 0.1, histogram) for _ in range(2))
    return Pass("", LOAD, repeat, 2 * seconds, answers)


# 4 rounds behind the first token: 1, 3, 2 and 2 tokens of them, correct drafts 0, 2, 1, 1.
ROUNDS = (1, 2, 1)


def test_a_speed_up_is_of_passes_made_side_by_side():
    plain = [made(0, 0.9), made(1, 1.8), made(2, 0.9)]
    drafted = [made(0, 0.6, ROUNDS), made(1, 0.9, ROUNDS), made(2, 0.9, ROUNDS)]
    found = result_of(0, drafted, plain, 2)
    assert found.ratios == pytest.approx((1.5, 2.0, 1.0))
    assert found.speedup == pytest.approx(1.5)
    assert found.tokens_per_s == pytest.approx(54 / 4.8)
    assert found.plain_tokens_per_s == pytest.approx(54 / 7.2)


def test_acceptance_is_pooled_and_rounds_are_timed_behind_the_first_token():
    found = result_of(0, [made(0, 0.5, ROUNDS)], [made(0, 0.9)], 2)
    assert found.accept_length == 2.0
    assert found.survival == pytest.approx((0.75, 0.25))
    assert found.plain_step_s == pytest.approx(0.8 / 8)
    assert found.break_even == pytest.approx((0.4 / 4) / (0.8 / 8))
    assert found.answer_s == pytest.approx(0.5)


def test_break_even_is_that_of_the_same_repeat_so_that_a_slow_one_counts_for_both():
    plain = [made(0, 0.9), made(1, 8.1), made(2, 0.9)]
    drafted = [made(0, 0.5, ROUNDS), made(1, 4.1, ROUNDS), made(2, 0.5, ROUNDS)]
    assert result_of(0, drafted, plain, 2).break_even == pytest.approx(1.0)


def test_break_even_is_the_benchmarks_where_the_first_piece_holds_a_round_and_the_last_comes_before_the_end():
    def pieced(answer: Completion, *pieces: tuple[float, int]) -> Pass:
        load = replace(LOAD, questions=LOAD.questions[:1])
        return Pass("", load, 0, answer.seconds, (replace(answer, pieces=pieces),))

    plain = pieced(answer(9, 1.0, 0.2), (0.2, 2), (0.5, 5), (0.9, 9))
    drafted = pieced(answer(9, 0.8, 0.2, ROUNDS), (0.2, 3), (0.6, 9))
    found = result_of(0, [drafted], [plain], 2)
    rounds_behind = 4 * 6 / 8  # of the 8 tokens behind the prefill's, 6 came behind the first piece
    assert found.break_even == pytest.approx((0.4 / rounds_behind) / (0.7 / 7))
    assert found.break_even == pytest.approx(Comparison("", "", (plain,), (drafted,)).break_even)
    assert found.plain_step_s == pytest.approx(0.1)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_error_of_the_acceptance_length_is_between_questions_and_no_repeat_lessens_it(repeats):
    # 4 rounds each: acceptance lengths 2 and 3, whose mean has the error 0.5.
    answers = (answer(9, 0.5, 0.1, (1, 2, 1)), answer(9, 0.5, 0.1, (0, 0, 4)))
    drafted = [Pass("", LOAD, repeat, 1.0, answers) for repeat in range(repeats)]
    found = result_of(0, drafted, [made(repeat, 0.9) for repeat in range(repeats)], 2)
    assert found.accept_length == 2.5
    assert found.accept_error == pytest.approx(0.5 / 2.5)


def test_one_question_tells_nothing_of_others():
    load = Load("heldout", (Question("q0", "chat", [1]),) * 2, 1, 0.0, 9)
    drafted = [Pass("", load, 0, 1.0, made(0, 0.5, ROUNDS).answers)]
    assert math.isinf(result_of(0, drafted, [made(0, 0.9)], 2).accept_error)


def test_a_plain_server_with_other_settings_has_no_acceptance():
    found = result_of(0, [made(0, 0.6)], [made(0, 0.9)], None)
    assert (found.accept_length, found.survival, found.break_even) == (None, (), None)
    assert found.speedup == pytest.approx(1.5)


def test_a_server_that_never_speculated_is_dropped_and_says_so():
    asked = _Asked(LOAD)
    asked.add(made(0, 0.9), PLAIN)
    asked.add(made(0, 0.6), DRAFTED)
    found = asked.measured([DRAFTED], 0)
    assert found.results == {}
    assert "no speculation ran at all" in found.failed[DRAFTED]


@pytest.mark.parametrize(("of_plain", "of_drafted"), [(2, 1), (1, 2)])
def test_a_repeat_that_was_cut_counts_for_neither(of_plain, of_drafted):
    asked = _Asked(LOAD)
    for repeat in range(of_plain):
        asked.add(made(repeat, 0.9), PLAIN)
    for repeat in range(of_drafted):
        asked.add(made(repeat, 0.6, ROUNDS), DRAFTED)
    assert len(asked.measured([DRAFTED], 0).results[DRAFTED].ratios) == 1


def test_a_candidate_that_fails_leaves_the_others_and_the_plain_server_ends_it():
    asked = _Asked(LOAD)
    asked.fail({DRAFTED: "out of memory"})
    assert asked.alive([PLAIN, DRAFTED]) == [PLAIN]
    assert asked.measured([DRAFTED], 0).failed == {DRAFTED: "out of memory"}
    with pytest.raises(DraftlineError, match=r"the plain server failed.*port 30000 is in use"):
        asked.fail({PLAIN: "port 30000 is in use"})


class Answering:
    """A server that gives the same answer always.

    Attributes:
        asked: what was asked of it, in order.
    """

    def __init__(self, histogram: tuple[int, ...] = (), room: int = 10_000):
        self._histogram, self._room, self.asked = histogram, room, []

    def flush_cache(self) -> None:
        self.asked.append("flush")

    def server_info(self) -> dict:
        return {"max_total_num_tokens": self._room}

    def generate(self, *_, **__) -> Completion:
        self.asked.append("answer")
        return answer(9, 0.5, 0.1, self._histogram)


class TwoServers:
    limit, can_start_together = 4, False

    def __init__(self):
        self.running = {}

    def ensure(self, wanted, ranked):
        self.running |= {candidate: Answering(ROUNDS if candidate.shape else ()) for candidate in wanted}
        return {}


@pytest.mark.parametrize("concurrency", [1, 2])
def test_all_that_is_asked_is_counted_aloud(capsys, concurrency):
    params = Params.model_validate({"benchmark": {"warmup_prompts": 1}})
    bench = ServerBench(params, concurrency, LOAD.questions, Budget(60), TwoServers())
    measured = bench.measure([DRAFTED], 2, 5, [])
    answers = 2 * (concurrency + 3 * 4 * concurrency)  # warmed up with one a user, asked four a user three times
    assert set(measured.results) == {DRAFTED}
    assert f"rung 5: {answers}/{answers} answer" in capsys.readouterr().err


class FewAnswers(Budget):
    """Spent after so many answers."""

    def __init__(self, answers: int):
        super().__init__(60)
        self._left = answers

    def require(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OutOfBudget


def test_where_no_pass_was_ended_the_warm_up_tells_what_an_answer_takes():
    params = Params.model_validate({"benchmark": {"warmup_prompts": 1}})
    measured = ServerBench(params, 1, LOAD.questions, FewAnswers(5), TwoServers()).measure([DRAFTED], 2, 0, [])
    assert (measured.results, measured.started, measured.is_cut) == ({}, 2, True)
    assert measured.plain_answer_s > 0


class FreshHost(TwoServers):
    """Servers that are asked for, in groups."""

    can_start_together = True

    def __init__(self, in_time: int = 9):
        super().__init__()
        self.groups, self._in_time = [], in_time

    def ensure(self, wanted, ranked):
        self.groups.append(list(wanted))
        if len(self.groups) > self._in_time:
            raise OutOfBudget
        return super().ensure([candidate for candidate in wanted if candidate not in self.running], ranked)


def on_a_gpu(fleet: TwoServers, questions=LOAD.questions) -> ServerBench:
    params = {"target": {"device": "cuda"}, "benchmark": {"warmup_prompts": 2}}
    return ServerBench(Params.model_validate(params), 1, questions, Budget(60), fleet)


def test_on_a_gpu_the_plain_server_compiles_alone_for_those_that_start_together():
    fleet = FreshHost()
    measured = on_a_gpu(fleet).measure([DRAFTED], 2, 0, [])
    assert fleet.groups == [[PLAIN], [PLAIN, DRAFTED]]
    assert measured.started == 1
    assert set(measured.results) == {DRAFTED}


def test_where_servers_run_in_turn_no_plain_server_starts_for_one_that_failed_before():
    class InTurn(FreshHost):
        limit = 1

        def ensure(self, wanted, ranked):
            self.running = {candidate: server for candidate, server in self.running.items() if candidate in wanted}
            super().ensure(wanted, ranked)
            return {DRAFTED: self.drop(DRAFTED, None)} if DRAFTED in wanted else {}

        def drop(self, candidate, error):
            del self.running[candidate]
            return "out of memory"

    fleet, other = InTurn(), Candidate(Shape(3, 1, 4))
    on_a_gpu(fleet).measure([DRAFTED, other], 2, 0, [])
    assert fleet.groups == [[PLAIN], [PLAIN], [DRAFTED], [other]]


def test_the_plain_server_that_starts_alone_is_as_warm_as_the_others():
    fleet = FreshHost()
    on_a_gpu(fleet).measure([DRAFTED], 2, 0, [])
    for server in fleet.running.values():
        assert server.asked[:4] == ["answer", "answer", "flush", "answer"]


def test_where_no_other_server_is_up_in_time_the_one_that_started_alone_tells_what_an_answer_takes():
    measured = on_a_gpu(FreshHost(in_time=1)).measure([DRAFTED], 2, 0, [])
    assert (measured.started, measured.is_cut) == (0, True)
    assert measured.plain_answer_s > 0


def test_a_cache_must_hold_what_later_rungs_ask_as_well():
    late = (*[Question(f"q{n}", "chat", [1]) for n in range(63)], Question("long", "chat", [1] * 500))

    class Small(FreshHost):
        def ensure(self, wanted, ranked):
            failed = super().ensure(wanted, ranked)
            if DRAFTED in self.running:
                self.running[DRAFTED] = Answering(ROUNDS, room=550)
            return failed

        def drop(self, candidate, error):
            del self.running[candidate]
            return str(error)

    needed = 500 + Params().benchmark.max_new_tokens + DRAFTED.shape.reserved
    assert on_a_gpu(Small(), late[:63]).measure([DRAFTED], 4, 0, []).failed == {}
    assert on_a_gpu(Small(), late).measure([DRAFTED], 4, 0, []).failed == {
        DRAFTED: f"its cache holds 550 tokens, and the requests can come to {needed}: raise serve.max_total_tokens "
        "or serve.mem_fraction_static"
    }
