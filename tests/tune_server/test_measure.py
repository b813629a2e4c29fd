"""From the answers of two servers to what the search is told, and a server that fails among others."""

import math

import pytest

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
    """A server that gives the same answer always."""

    def __init__(self, histogram: tuple[int, ...] = ()):
        self._histogram = histogram

    def flush_cache(self) -> None:
        pass

    def server_info(self) -> dict:
        return {}

    def generate(self, *_, **__) -> Completion:
        return answer(9, 0.5, 0.1, self._histogram)


class TwoServers:
    limit, starts_together = 4, False

    def __init__(self):
        self.running = {}

    def ensure(self, wanted, standing):
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

    def require(self, *_: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise OutOfBudget


def test_where_no_pass_was_ended_the_warm_up_tells_what_an_answer_takes():
    params = Params.model_validate({"benchmark": {"warmup_prompts": 1}})
    measured = ServerBench(params, 1, LOAD.questions, FewAnswers(5), TwoServers()).measure([DRAFTED], 2, 0, [])
    assert (measured.results, measured.started, measured.is_cut) == ({}, 2, True)
    assert measured.plain_answer_s > 0


class FreshHost:
    """Servers that are asked for, in groups; the second group is not up in time."""

    limit, starts_together = 4, True

    def __init__(self):
        self.running, self.groups = {}, []

    def ensure(self, wanted, standing):
        self.groups.append(list(wanted))
        if len(self.groups) > 1:
            raise OutOfBudget
        self.running |= dict.fromkeys(wanted)
        return {}


def test_on_a_gpu_the_plain_server_compiles_alone_for_those_that_start_together():
    fleet = FreshHost()
    bench = ServerBench(Params.model_validate({"target": {"device": "cuda"}}), 1, LOAD.questions, Budget(60), fleet)
    measured = bench.measure([DRAFTED], 2, 0, [])
    assert fleet.groups == [[PLAIN], [PLAIN, DRAFTED]]
    assert (measured.started, measured.is_cut) == (0, True)
