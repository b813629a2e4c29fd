"""The figures of a benchmark, from planted pairs of answers."""

import csv

import pytest

from tasks.benchmark.measure import Pair
from tasks.benchmark.plots import plot_accept_length_by_domain, plot_survival, plot_throughput, write_csv
from tasks.benchmark.summary import break_even, prompt_rows, speedup_interval, summarise
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.responses import Response
from tasks.common.sglang_client import Completion


def completion(tokens, seconds, histogram=()) -> Completion:
    correct = sum(length * count for length, count in enumerate(histogram))
    return Completion(tokens, "", "length", 3, 0, "v", sum(histogram), correct, tuple(histogram), None, seconds)


def pair(
    name, domain="chat", tokens=10, baseline_s=2.0, speculative_s=1.0, histogram=(2, 0, 0, 2), drafted=None, repeat=0
):
    ids = list(range(tokens))
    prompt = Response(name, domain, [], [1, 2, 3], [], "", "stop")
    return Pair(prompt, repeat, completion(ids, baseline_s), completion(drafted or ids, speculative_s, histogram))


def report(pairs):
    return summarise(pairs, Params(), predicted=2.0, side_by_side=True)


def test_speed_is_total_tokens_over_total_seconds_and_not_a_mean_of_ratios():
    pairs = [pair("a", tokens=90, baseline_s=9, speculative_s=3), pair("b", tokens=10, baseline_s=1, speculative_s=1)]
    figures = report(pairs)
    assert figures["baseline"]["tokens_per_s"] == 10
    assert figures["speculative"]["tokens_per_s"] == 25
    assert figures["speedup"] == 2.5


def test_acceptance_is_pooled_and_comes_with_survival_and_settings():
    figures = report([pair("a", histogram=(2, 1, 0, 3)), pair("b", histogram=(4, 0, 0, 0))])
    assert figures["speculative"]["accept_length"] == 2.0
    assert figures["speculative"]["verify_rounds"] == 10
    assert figures["survival"] == figures["speculative"]["survival"] == [0.4, 0.3, 0.3]
    assert figures["served_over_predicted"] == 1.0
    assert figures["settings"]["draft_tokens"] == 4


def test_without_a_single_round_there_is_no_report():
    with pytest.raises(DraftlineError, match="no speculation ran at all"):
        report([pair("a", histogram=())])


def test_a_token_that_differs_is_found():
    parted = pair("b", tokens=4, drafted=[0, 1, 9, 3])
    figures = report([pair("a"), parted])
    assert not figures["lossless"]
    assert figures["first_difference"] == {"prompt": "b", "position": 2, "baseline": [2], "speculative": [9]}


def test_an_answer_that_ends_early_is_a_difference():
    assert pair("a", tokens=4, drafted=[0, 1]).first_difference == 2


def test_equal_answers_are_lossless():
    assert report([pair("a"), pair("b")])["lossless"]


def test_the_interval_spans_the_prompts_and_repeats_of_one_are_drawn_together():
    same = [pair("a", repeat=0), pair("a", speculative_s=2.0, repeat=1)]
    low, high = speedup_interval(same)
    assert low == high  # one prompt: nothing to resample, however its repeats differ
    low, high = speedup_interval([pair(str(i), speculative_s=s) for i, s in enumerate((0.5, 1, 1, 1, 2))])
    assert 1 <= low < 2 < high <= 4


def test_break_even_is_the_cost_of_a_round_in_plain_tokens():
    # 4 rounds in 1 s, plain 5 tokens/s: a round costs 1.25 plain tokens
    assert break_even([pair("a")]) == pytest.approx(1.25)


def test_domains_are_reported_apart_and_leave_out_those_that_never_speculated():
    rows = report([pair("a", "maths"), pair("b", "chat", histogram=(4,)), pair("c", "code", histogram=())])["by_domain"]
    assert [(row["domain"], row["accept_length"]) for row in rows] == [("chat", 1.0), ("maths", 2.5)]


def test_pictures_come_with_their_numbers(tmp_path):
    pairs = [pair(str(i), domain) for i, domain in enumerate(("chat", "code", "maths"))]
    figures, rows = report(pairs), prompt_rows(pairs)
    write_csv(tmp_path / "prompts.csv", rows)
    for png in (
        plot_survival(figures, tmp_path),
        plot_accept_length_by_domain(figures, tmp_path),
        plot_throughput(figures, rows, tmp_path),
    ):
        assert png.read_bytes().startswith(b"\x89PNG")
        assert len(list(csv.DictReader(png.with_suffix(".csv").open()))) >= 2
    assert [row["accept_length"] for row in csv.DictReader((tmp_path / "prompts.csv").open())] == ["2.5"] * 3
