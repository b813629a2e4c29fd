"""Speed, acceptance, break-even and agreement, from planted passes."""

import math
import random

import pytest

from tasks.benchmark.figures import Comparison, compare, latency_ms, stream_speed, student
from tasks.common.errors import DraftlineError
from tests.benchmark.passes import comparison, completion, load, made


def test_speed_is_total_tokens_over_total_seconds_and_not_a_mean_of_ratios():
    found = comparison([completion(90, 9), completion(10, 1)], [completion(90, 3, (9, 27)), completion(10, 1, (4, 2))])
    assert found.speedup == pytest.approx(2.5)  # a mean of the ratios would be 2


def test_acceptance_is_pooled_over_rounds():
    found = comparison([completion(10, 1)] * 2, [completion(10, 1, (2, 1, 0, 3)), completion(10, 1, (4, 0, 0, 0))])
    assert found.acceptance.accept_length == 2.0
    assert found.acceptance.survival(3) == [0.4, 0.3, 0.3]


def test_without_a_single_round_there_is_no_acceptance():
    with pytest.raises(DraftlineError, match="no speculation ran at all"):
        _ = comparison([completion(5, 1)], [completion(5, 1)]).acceptance


def test_break_even_is_the_cost_of_a_round_in_plain_tokens():
    # 4 rounds in 1 s, plain 5 tokens/s: a round costs 1.25 plain tokens.
    assert comparison([completion(10, 2)], [completion(10, 1, (2, 0, 0, 2))]).break_even == pytest.approx(1.25)


@pytest.mark.parametrize("accepted", [0.5, 1.0, 1.5])
def test_prefill_does_not_draw_break_even_towards_what_is_accepted(accepted):
    """A prefill of a second, a plain step of 10 ms, a round of 20 ms: 2 is needed, however much is accepted."""
    rounds = round(99 / (1 + accepted))
    plain = completion(100, 1 + 99 * 0.01, pieces=((1.0, 1), (1 + 99 * 0.01, 100)))
    ended = 1 + rounds * 0.02
    drafted = completion(100, ended, (rounds,), pieces=((1.0, 1), (ended, 100)))
    assert comparison([plain], [drafted]).break_even == pytest.approx(2.0)


def test_break_even_leaves_out_rounds_that_came_with_the_first_piece():
    # 3 of 9 tokens behind the prefill's came with the first piece, and so a third of the three rounds.
    drafted = completion(10, 1.0, (0, 0, 3), pieces=((0.4, 4), (1.0, 10)))
    plain = completion(10, 1.0, pieces=((0.1, 1), (1.0, 10)))
    assert comparison([plain], [drafted]).break_even == pytest.approx(0.6 / 2 / 0.1)


def test_break_even_counts_what_a_request_waits_and_not_what_all_get_together():
    # Two users at once: 10 tokens each in 2 s, so a token takes each of them 0.2 s; a round 0.25 s.
    of = load(2, concurrency=2)
    plain = made("baseline", of, [completion(10, 2)] * 2, seconds=2)
    drafted = made("speculative", of, [completion(10, 1, (2, 0, 0, 2))] * 2, seconds=1)
    assert Comparison("speculative", "heldout", (plain,), (drafted,)).break_even == pytest.approx(1.25)


@pytest.mark.parametrize(("drafted", "at"), [([0, 1, 9, 3], 2), ([0, 1], 2), ([0, 1, 2, 3], None)])
def test_answers_part_at_the_first_token_that_differs_or_is_missing(drafted, at):
    assert comparison([completion(4, 1)], [completion(drafted, 1, (1,))]).pairs[0].first_difference == at


def test_agreement_is_the_share_of_equal_answers_and_of_tokens_before_they_part():
    found = comparison([completion(4, 1)] * 2, [completion(4, 1, (1,)), completion([0, 9, 2, 3], 1, (1,))])
    assert found.agreement == 0.5
    assert found.agreed_tokens == 5 / 8


def timed(drafted, plain=2.0, questions=1, concurrency=1) -> Comparison:
    """Every answer 10 tokens in `plain` seconds without the draft, and in those of `drafted[pass][question]` with it."""
    of = load(questions, concurrency=concurrency)
    return Comparison(
        "speculative",
        "heldout",
        tuple(made("baseline", of, [completion(10, plain)] * questions, n) for n in range(len(drafted))),
        tuple(made("speculative", of, [completion(10, s, (1, 3)) for s in one], n) for n, one in enumerate(drafted)),
    )


def test_of_one_question_the_interval_is_that_of_its_passes():
    found = timed([[1.0], [1.5], [2.0]])
    assert found.speedup_interval == pytest.approx(student([2, 2 / 1.5, 1]))
    low, high = found.speedup_interval
    assert low < 1 < found.speedup < high


def test_where_questions_differ_and_passes_agree_the_interval_spans_the_questions():
    low, high = timed([[0.5, 1, 1, 1, 2]] * 3, questions=5).speedup_interval
    assert 1 <= low < 2 < high <= 4


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_pass_in_which_one_server_alone_was_slow_widens_the_interval_however_many_questions_were_asked(concurrency):
    found = timed([[seconds] * 40 for seconds in (1, 1.1, 0.9)], questions=40, concurrency=concurrency)
    assert found.speedup_interval == pytest.approx(student([2, 2 / 1.1, 2 / 0.9]))


def test_at_several_at_once_the_interval_spans_the_questions_around_the_ratio_of_what_all_get():
    """One of two users has nothing to ask for half the time: waiting for answers gained 4/3, the pass as a whole nothing."""
    of = load(2, concurrency=2)
    plain = tuple(made("baseline", of, [completion(10, 1.0)] * 2, n, seconds=1.0) for n in range(3))
    answers = [completion(10, seconds, (1, 3)) for seconds in (0.5, 1.0)]
    drafted = tuple(made("speculative", of, answers, n, seconds=1.0) for n in range(3))
    found = Comparison("speculative", "heldout", plain, drafted)
    assert found.speedup == 1.0
    assert found.speedup_interval == pytest.approx((0.75, 1.5))  # 1 and 2 over 4/3


@pytest.mark.parametrize("questions", [1, 2, 3, 8])
def test_the_interval_holds_the_true_ratio_of_the_questions_asked_in_92_of_100_benchmarks(questions):
    """Planted as on an H200: answers that differ by 20 %, questions by 21, and passes in which one server was 10 % slower."""
    draw, held = random.Random(questions), 0
    for _ in range(200):
        true = [math.exp(draw.gauss(0, 0.21)) for _ in range(questions)]
        slow = [math.exp(draw.gauss(0, 0.1)) for _ in range(3)]
        passes = [[seconds * of_pass * math.exp(draw.gauss(0, 0.2)) for seconds in true] for of_pass in slow]
        low, high = timed(passes, questions=questions).speedup_interval
        held += low <= 2 * questions / sum(true) <= high
    assert held >= 0.92 * 200


def test_students_interval_of_three_passes_is_wide():
    # Ratios 1, 2, 4: logarithms 0, ln 2, 2 ln 2, so the half width is 4.303 ln 2 / sqrt 3.
    low, high = student([1, 2, 4])
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert (low, high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)), rel=1e-5)


def test_only_what_both_servers_have_answered_is_compared():
    of, more = load(1), load(1, concurrency=2)
    answer = completion(4, 1, (1, 1))
    passes = [made("baseline", of, [answer]), made("draft", of, [answer]), made("baseline", more, [answer])]
    assert [(one.draft, one.load.concurrency) for one in compare(passes, ["draft"], "baseline")] == [("draft", 1)]


def test_several_sets_are_also_pooled_and_each_concurrency_by_itself():
    answer = completion(4, 1, (1, 1))
    loads = [load(1, name, concurrency) for concurrency in (1, 2) for name in ("maths", "code")]
    passes = [made(arm, of, [answer]) for of in loads for arm in ("baseline", "draft")]
    names = [(one.name, one.load.concurrency) for one in compare(passes, ["draft"], "baseline")]
    assert names == [("maths", 1), ("code", 1), ("all", 1), ("maths", 2), ("code", 2), ("all", 2)]


def test_latency_is_read_from_the_pieces_and_a_piece_of_three_tokens_is_three_gaps():
    streamed = completion(5, 1.0, (1, 1), pieces=((0.4, 1), (0.5, 2), (0.8, 5)))
    passes = [made("baseline", load(2), [streamed, completion(5, 1.0)])]
    assert passes[0].first_token_seconds == [0.4]
    assert passes[0].inter_token_seconds == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert latency_ms(passes, lambda one: one.inter_token_seconds)["p99"] == pytest.approx(100)
    assert stream_speed(passes) == pytest.approx(10)


def test_latency_of_answers_that_were_not_streamed_is_not_known():
    passes = [made("baseline", load(1), [completion(5, 1.0)])]
    assert latency_ms(passes, lambda one: one.first_token_seconds) == {"p50": None, "p99": None}
    assert stream_speed(passes) is None
