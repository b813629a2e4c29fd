"""The gate on the cells of a benchmark: ours fail it, other people's drafts warn."""

import pytest

from tests.planted_benchmark import asked_for, cell, write_benchmark

ROUNDS = "The server verified drafts in every cell"
DEFINITION = "Every cell's acceptance length is 1 + correct drafts / rounds, and its survival sums to it"
TOO_FAST = "Every cell's speed-up / acceptance length is at most 1.05"
BREAK_EVEN = "Every cell's break-even acceptance length was measured"
PASSES = "Every cell was measured in at least 3 passes"
SPREAD = "Every cell's speeds are within the spread of its passes"
RATIO = "Every cell's speed-up is the ratio of its tokens per second"
FALLS = "Every cell's survival has a share for each draft step, and none above the one before"
SLOWER = "The server is faster with the draft than without in every cell"
ALL_SAME, MOSTLY_SAME = (
    "None of a cell's greedy answers differ from the plain server's",
    "At most 10% of a cell's greedy answers differ from the plain server's",
)
BROKEN = [
    (ROUNDS, {"verify_rounds": 0, "correct_drafts": 0, "accept_length": 1.0, "survival": [0, 0, 0]}),
    (DEFINITION, {"accept_length": 2.6, "survival": [0.7, 0.6, 0.3]}),
    (DEFINITION, {"survival": [0.7, 0.5, 0.2]}),
    (TOO_FAST, {"speedup": 2.7}),
    (RATIO, {"speedup": 1.6, "tokens_per_s": {"pooled": 15.0, "median": 15.0, "min": 14.0, "max": 16.0}}),
    (FALLS, {"survival": [0.3, 0.5, 0.7]}),
    (FALLS, {"survival": [0.7, 0.5, 0.3, 0.0]}),
    (FALLS, {"survival": [1.2, 0.3, 0.0]}),
    (FALLS, {"survival": [0.9, 0.7, -0.1]}),
    (BREAK_EVEN, {"break_even_accept_length": 0.0}),
    (PASSES, {"repeats": 2}),
    (SPREAD, {"tokens_per_s": {"pooled": 15.5, "median": 15.0, "min": 15.1, "max": 16.0}}),
    (SPREAD, {"tokens_per_s": {"pooled": 14.0, "median": 15.2, "min": 15.1, "max": 16.0}}),
    (SPREAD, {"baseline_tokens_per_s": {"pooled": 9.5, "median": 10.0, "min": 9.0, "max": 9.9}}),
    (MOSTLY_SAME, {"agreement": 0.89}),
]


@pytest.fixture
def judge_cells(tmp_path, monkeypatch, judge_benchmark):
    """`judge_cells(cell(...), ...)`: the verdict on a sound benchmark with these cells beside its own."""
    monkeypatch.chdir(tmp_path)

    def judged(*cells: dict, **sections):
        others = {one["draft"]: "someone/draft" for one in cells} | sections.pop("drafts", {})
        others.pop("speculative", None)
        dtype = sections.get("target", {}).get("dtype", "float32")
        asked = {
            "concurrency": sorted({1} | {one["concurrency"] for one in cells}),
            "temperatures": sorted({0.0} | {one["temperature"] for one in cells}),
        }
        changed = {
            "benchmark": {"drafts": others} | asked,
            "serve": {"max_running_requests": asked["concurrency"][-1]},
        }
        write_benchmark(cells=[cell(), *cells], settings={"dtype": dtype} | asked | asked_for(**changed))
        return judge_benchmark(**changed, **sections)

    return judged


def test_cells_of_ours_that_cannot_be_fail_and_are_named(judge_cells):
    verdict = judge_cells(*(cell(concurrency=2 + n, **changes) for n, (_, changes) in enumerate(BROKEN)))
    assert set(verdict.outcome("failed")) == {sentence for sentence, _ in BROKEN}
    for number, (sentence, _) in enumerate(BROKEN):
        assert f"heldout, {2 + number} at once, temperature 0" in verdict.samples(sentence)
        assert "heldout, 1 at once, temperature 0" not in verdict.samples(sentence)


def test_cells_of_others_drafts_only_warn_and_name_the_draft(judge_cells):
    verdict = judge_cells(*(cell(draft=f"theirs-{n}", **changes) for n, (_, changes) in enumerate(BROKEN)))
    assert verdict.error == ""
    [table] = [table for table in verdict.report["tables"] if table["name"] == "cells of other drafts"]
    findings = {finding["sentence"]: finding for finding in table["findings"]}
    for number, (sentence, _) in enumerate(BROKEN):
        assert findings[sentence]["outcome"] == "warned"
        named = [sample["id"] for sample in findings[sentence]["samples"]]
        assert f"theirs-{number}: heldout, 1 at once, temperature 0" in named


def test_a_cell_that_is_slower_warns_with_what_it_would_have_needed(judge_cells):
    verdict = judge_cells(cell(concurrency=4, speedup=0.8, break_even_accept_length=3.1))
    assert verdict.error == ""
    assert verdict.outcome("warned") == [SLOWER]
    assert "acceptance length 2.5, break-even 3.1" in verdict.findings[SLOWER]["samples"][0]["found"]


def test_a_few_answers_that_differ_among_many_at_once_are_a_warning(judge_cells):
    verdict = judge_cells(cell(concurrency=4, agreement=0.95))
    assert verdict.error == ""
    assert verdict.outcome("warned") == [ALL_SAME]


def test_at_a_temperature_and_in_half_precision_answers_may_differ(judge_cells):
    assert judge_cells(cell(temperature=1.0, agreement=None)).outcome("warned") == []
    assert judge_cells(cell(concurrency=4, agreement=0.5), target={"dtype": "bfloat16"}).outcome("warned") == []


def test_a_speed_up_is_the_ratio_within_the_digits_that_are_written(judge_cells):
    slow = {"pooled": 0.05, "median": 0.05, "min": 0.04, "max": 0.06}  # 0.054 of 0.046
    assert judge_cells(cell(concurrency=2, speedup=1.174, tokens_per_s=slow, baseline_tokens_per_s=slow)).error == ""


def test_temperatures_that_hardly_differ_are_two_cells(judge_cells):
    assert judge_cells(*(cell(temperature=one, agreement=None) for one in (0.7, 0.70000001))).error == ""
