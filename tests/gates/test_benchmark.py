"""The gate on a benchmark's pooled figures, prompts, context lengths and settings."""

import pytest

from tests.planted_benchmark import SETTINGS, bucket, cell, pooled, write_benchmark

FALLS = "Longer contexts keep 50% of the shortest contexts' acceptance length above 1"
SETTING = "The figures were measured with the settings of params.yaml"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(speedup=..., parted=3)` writes the reports of a benchmark into the current directory."""
    monkeypatch.chdir(tmp_path)
    return write_benchmark


def test_a_sound_benchmark_passes(write, judge):
    write()
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speedup": 2.7}, "Speed-up / acceptance length is at most 1.05"),
        ({"predicted_accept_length": 1.9}, "Served acceptance length is within 25% of the prediction"),
        ({"survival": [0.5, 0.7, 0.3]}, "Survival never rises with the position"),
        ({"survival": [0.7, 0.5, 0.2]}, "Survival over the positions sums to acceptance length - 1"),
        ({"break_even_accept_length": 0}, "The break-even acceptance length was measured"),
    ],
)
def test_a_figure_that_cannot_be_is_named(write, judge, changes, sentence):
    write(**changes)
    assert sentence in judge("benchmark").outcome("failed")


def test_a_ratio_is_found_with_the_figures_that_it_is_of(write, judge):
    write(predicted_accept_length=2.156093489148581)
    verdict = judge("benchmark")
    assert verdict.findings["Speed-up / acceptance length is at most 1.05"]["observed"] == "0.6 = 1.5 / 2.5"
    prediction = verdict.findings["Served acceptance length is within 10% of the prediction"]
    assert prediction["observed"] == "0.1595 = |2.5 / 2.156 - 1|"
    assert "2.1560" not in verdict.page.replace("2.1561", "")


def test_a_warning_says_in_the_terminal_what_was_expected_and_found(write, judge, capsys):
    write(predicted_accept_length=2.2)
    judge("benchmark")
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "warning, not met: Served acceptance length is within 10% of the prediction: expected ≤ 0.1, "
        "found 0.1364 = |2.5 / 2.2 - 1| (all prompts)"
    ) in said


def test_acceptance_below_the_limit_fails(write, judge):
    write()
    verdict = judge("benchmark", gates={"min_accept_length": 2.6})
    assert verdict.outcome("failed") == ["Acceptance length is at least gates.min_accept_length"]
    assert "expected ≥ 2.6" in verdict.error


def test_acceptance_without_speculation_fails(write, judge):
    write(speculative=pooled(accept_length=1.0, verify_rounds=0, correct_drafts=0))
    assert "The server verified drafts" in judge("benchmark").outcome("failed")


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": pooled(accept_length=2.6), "survival": [0.7, 0.5, 0.4]},
        {"cells": [cell(accept_length=2.25, correct_drafts=125, survival=[0.6, 0.4, 0.25])]},
    ],
)
def test_acceptance_of_another_definition_or_measurement_fails(write, judge, changes):
    write(**changes)
    (sentence,) = judge("benchmark").outcome("failed")
    assert sentence.startswith("Acceptance length is 1 + correct drafts / rounds")


def test_the_headline_is_of_our_draft_greedy_at_the_lowest_concurrency_over_every_set(write, judge):
    counts = {"verify_rounds": 50, "survival": [0.9, 0.8, 0.7]}
    sets = [
        cell(set="math", correct_drafts=120, accept_length=3.4, **counts),
        cell(set="code", correct_drafts=30, accept_length=1.6, verify_rounds=50, survival=[0.3, 0.2, 0.1]),
    ]
    elsewhere = [
        cell(set="math", concurrency=4, accept_length=2.0, correct_drafts=100, survival=[0.5, 0.3, 0.2]),
        cell(set="all"),
    ]
    write(cells=[*sets, *elsewhere], settings={"sets": ["math", "code"], "concurrency": [1, 4]})
    verdict = judge("benchmark", serve={"max_running_requests": 4}, benchmark=asked(("math", "code"), (1, 4)))
    assert verdict.error == ""


def asked(sets, concurrency=(1,)) -> dict:
    return {"sets": {name: f"{name}.jsonl" for name in sets}, "concurrency": concurrency}


def test_a_gap_to_the_prediction_is_first_a_warning(write, judge):
    write(predicted_accept_length=2.2)
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == ["Served acceptance length is within 10% of the prediction"]


def test_where_no_heldout_prompts_were_asked_nothing_is_compared_with_the_prediction_and_the_page_says_so(write, judge):
    write(predicted_accept_length=None, cells=[cell(set="math")], settings={"sets": ["math"]})
    verdict = judge("benchmark", benchmark=asked(["math"]))
    assert verdict.error == ""
    assert not [sentence for sentence in verdict.findings if "prediction" in sentence]
    assert "not compared: no held-out prompts were asked" in verdict.page


def test_a_server_that_is_slower_is_a_warning(write, judge):
    write(speedup=0.9, break_even_accept_length=2.8)
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == ["The server is faster with the draft than without"]


def test_text_that_differs_names_the_prompt_and_fails_in_float32(write, judge):
    write(parted=3, lossless=False)
    verdict = judge("benchmark")
    assert verdict.samples("The text with the draft is the plain greedy text") == ["chat-2, repeat 0"]
    assert "parts at token 3" in verdict.error


def test_text_that_differs_is_a_warning_in_half_precision(write, judge):
    write(parted=3, lossless=False, settings={"dtype": "bfloat16"})
    verdict = judge("benchmark", target={"dtype": "bfloat16"})
    assert verdict.error == ""
    assert "The text with the draft is the plain greedy text" in verdict.outcome("warned")


def test_acceptance_that_falls_with_the_context_warns_and_names_the_bucket(write, judge):
    write(by_context=[bucket("up to 128", 2.6), bucket("129 to 256", 1.81), bucket("257 to 512", 1.79)])
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == [FALLS]
    [sample] = verdict.findings[FALLS]["samples"]
    assert sample["id"] == "257 to 512 tokens"
    assert "acceptance length 1.79 in 50 rounds, and 2.6 at up to 128 tokens" in sample["found"]


@pytest.mark.parametrize(
    "buckets",
    [
        [bucket("up to 128", 2.6), bucket("129 to 256", 1.1, verify_rounds=49)],
        [bucket("up to 128", 2.6, verify_rounds=49), bucket("129 to 256", 1.1)],
        [bucket("up to 128", 1.0), bucket("129 to 256", 1.0)],
    ],
)
def test_a_bucket_of_few_rounds_or_without_anything_to_lose_is_not_judged(write, judge, buckets):
    write(by_context=buckets)
    assert FALLS not in judge("benchmark").outcome("warned")


def test_figures_measured_with_other_settings_fail_and_each_is_named(write, judge):
    write()
    other = {
        "num_prompts": 5,
        "max_new_tokens": 128,
        "repeats": 5,
        "concurrency": (1, 2),
        "temperatures": (0.0, 1.0),
        "sets": {"math": "math.jsonl"},
        "drafts": {"theirs": "someone/draft"},
    }
    verdict = judge("benchmark", benchmark=other, target={"dtype": "bfloat16"})
    assert verdict.outcome("failed") == [SETTING]
    assert verdict.samples(SETTING) == [*other, "dtype"]


def test_another_draft_length_fails(write, judge):
    write(settings={"steps": 2, "draft_tokens": 3})
    assert judge("benchmark").samples(SETTING) == ["steps", "draft_tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": {"accept_length": 2.5}},
        {"cells": [{"draft": "speculative"}]},
        {"by_context": None},
        {"settings": {"sets": None}},
    ],
)
def test_a_report_of_another_version_is_unreadable(write, judge, changes):
    write(**changes)
    assert "nothing was judged" in judge("benchmark").error
    assert "written by another version" in judge("benchmark").error


def test_planted_settings_are_those_of_the_default_parameters(params):
    """Else the tests above would say nothing of what a run asks for."""
    assert SETTINGS["repeats"] == params.benchmark.repeats
    assert SETTINGS["concurrency"] == list(params.benchmark.concurrency)
