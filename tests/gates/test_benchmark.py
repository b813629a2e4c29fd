import csv

import pytest

from tasks.common.files import REPORTS, write_json

FIELDS = "prompt domain repeat verify_rounds correct_drafts accept_length baseline_tokens_per_s speculative_tokens_per_s speedup first_difference"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(speedup=..., parted=3)` writes the reports of a benchmark: two prompts, 100 rounds, 150 correct drafts."""
    monkeypatch.chdir(tmp_path)

    def write_reports(parted: int | str = "", **changes) -> None:
        report = {
            "speculative": {"accept_length": 2.5, "tokens_per_s": 15.0, "verify_rounds": 100, "correct_drafts": 150},
            "baseline": {"tokens_per_s": 10.0},
            "speedup": 1.5,
            "lossless": True,
            "predicted_accept_length": 2.4,
            "survival": [0.7, 0.5, 0.3],
            "by_domain": [{"domain": "chat", "accept_length": 2.5, "speedup": 1.5}],
            "settings": {
                "steps": 3,
                "topk": 1,
                "draft_tokens": 4,
                "max_new_tokens": 48,
                "repeats": 1,
                "dtype": "float32",
            },
        }
        write_json(REPORTS / "benchmark.json", report | changes)
        rows = [
            ["chat-1", "chat", 0, 60, 90, 2.5, 10, 15, 1.5, ""],
            ["chat-2", "chat", 0, 40, 60, 2.5, 10, 15, 1.5, parted],
        ]
        with (REPORTS / "benchmark_prompts.csv").open("w", newline="") as file:
            csv.writer(file).writerows([FIELDS.split(), *rows])

    return write_reports


def speculative(**changes) -> dict:
    return {"accept_length": 2.5, "tokens_per_s": 15.0, "verify_rounds": 100, "correct_drafts": 150} | changes


def test_a_sound_benchmark_passes(write, judge):
    write()
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speedup": 2.7}, "The speed-up is not above the acceptance length"),
        ({"predicted_accept_length": 1.9}, "Served acceptance length is within 25% of the prediction"),
        ({"survival": [0.5, 0.7, 0.3]}, "Survival never rises with the position"),
        ({"survival": [0.7, 0.5, 0.2]}, "Survival over the positions sums to acceptance length - 1"),
    ],
)
def test_a_figure_that_cannot_be_is_named(write, judge, changes, sentence):
    write(**changes)
    assert sentence in judge("benchmark").outcome("failed")


def test_acceptance_below_the_limit_fails(write, judge):
    write()
    verdict = judge("benchmark", gates={"min_accept_length": 2.6})
    assert verdict.outcome("failed") == ["Acceptance length is at least gates.min_accept_length"]
    assert "expected ≥ 2.6" in verdict.error


def test_acceptance_without_speculation_fails(write, judge):
    write(speculative=speculative(accept_length=1.0, verify_rounds=0, correct_drafts=0))
    assert "The server verified drafts" in judge("benchmark").outcome("failed")


def test_acceptance_of_another_definition_fails(write, judge):
    write(speculative=speculative(accept_length=2.6), survival=[0.7, 0.5, 0.4])
    (sentence,) = judge("benchmark").outcome("failed")
    assert sentence.startswith("Acceptance length is 1 + correct drafts / rounds")


def test_a_gap_to_the_prediction_is_first_a_warning(write, judge):
    write(predicted_accept_length=2.2)
    verdict = judge("benchmark")
    assert verdict.error == ""
    assert verdict.outcome("warned") == ["Served acceptance length is within 10% of the prediction"]


def test_text_that_differs_names_the_prompt_and_fails_in_float32(write, judge):
    write(parted=3, lossless=False)
    verdict = judge("benchmark")
    assert verdict.samples("The text with the draft is the plain greedy text") == ["chat-2, repeat 0"]
    assert "parts at token 3" in verdict.error


def test_text_that_differs_is_a_warning_in_half_precision(write, judge):
    settings = {"steps": 3, "topk": 1, "draft_tokens": 4, "max_new_tokens": 48, "repeats": 1, "dtype": "bfloat16"}
    write(parted=3, lossless=False, settings=settings)
    verdict = judge("benchmark", target={"dtype": "bfloat16"})
    assert verdict.error == ""
    assert "The text with the draft is the plain greedy text" in verdict.outcome("warned")


def test_figures_measured_with_other_settings_fail(write, judge):
    write()
    verdict = judge("benchmark", benchmark={"max_new_tokens": 128})
    assert verdict.samples("The figures were measured with the settings of params.yaml") == ["max_new_tokens"]


def test_a_report_of_another_version_is_unreadable(write, judge):
    write(speculative={"accept_length": 2.5})
    assert "nothing was judged" in judge("benchmark").error
