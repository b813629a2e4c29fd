"""The gate on a benchmark's pooled figures, prompts, context lengths and settings."""

from pathlib import Path

import pytest

from tasks.common.files import ARTIFACTS, write_json
from tasks.common.params import Gates
from tasks.gates.benchmark_files import PROMPTS, REPORT, read_report
from tasks.gates.benchmark_suite import figure_suite
from tasks.gates.report import GATES
from tests.planted_benchmark import DRAFT, SETTINGS, asked_for, bucket, cell, pooled, write_benchmark

FALLS = "Longer contexts keep 50% of the shortest contexts' acceptance length above 1"
TABLE = "Speeds, speed-up, break-even acceptance length and survival are those of the table"
BEGINNING = "Of the answers' first tokens 25% stand before the first difference, in any type"
SETTING = "The figures were measured with the settings of params.yaml, in every cell once"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(speedup=..., parted=3)` writes the reports of a benchmark into the current directory."""
    monkeypatch.chdir(tmp_path)
    return write_benchmark


def test_a_sound_benchmark_passes(write, judge_benchmark):
    write()
    verdict = judge_benchmark()
    assert verdict.error == ""
    assert verdict.outcome("warned") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speedup": 2.7}, "Speed-up / acceptance length is at most 1.05"),
        ({"predicted_accept_length": 1.9}, "Served acceptance length is within 25% of the prediction"),
        ({"survival": [0.5, 0.7, 0.3]}, "Survival never rises with the position"),
        ({"survival": [0.7, 0.5, 0.2]}, "Survival over the positions sums to acceptance length - 1"),
        ({"survival": [0.6, 0.5, 0.4]}, TABLE),
        ({"survival": [0.7, 0.5, 0.3, 0.0]}, TABLE),
        ({"speculative": pooled(tokens_per_s=99.0)}, TABLE),
        ({"baseline": {"tokens_per_s": 9.0}}, TABLE),
        ({"break_even_accept_length": 0}, "The break-even acceptance length was measured"),
        ({"cells": [cell(speedup=1.4)]}, TABLE),
        (
            {"cells": [cell(break_even_accept_length=1e9)]},
            TABLE,
        ),
    ],
)
def test_a_figure_that_cannot_be_is_named(write, judge_benchmark, changes, sentence):
    write(**changes)
    assert sentence in judge_benchmark().outcome("failed")


def test_a_ratio_is_found_with_the_figures_that_it_is_of(write, judge_benchmark):
    write(predicted_accept_length=2.156093489148581)
    verdict = judge_benchmark()
    assert verdict.findings["Speed-up / acceptance length is at most 1.05"]["observed"] == "0.6 = 1.5 / 2.5"
    prediction = verdict.findings["Served acceptance length is within 10% of the prediction"]
    assert prediction["observed"] == "0.1595 = |2.5 / 2.156 - 1|"
    assert "2.1560" not in verdict.page.replace("2.1561", "")


def test_a_warning_says_in_the_terminal_what_was_expected_and_found(write, judge_benchmark, capsys):
    write(predicted_accept_length=2.2)
    judge_benchmark()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "warning, not met: Served acceptance length is within 10% of the prediction: expected ≤ 0.1, "
        "found 0.1364 = |2.5 / 2.2 - 1| (all prompts)"
    ) in said


def test_acceptance_below_the_limit_fails(write, judge_benchmark):
    write()
    verdict = judge_benchmark(gates={"min_accept_length": 2.6})
    assert verdict.outcome("failed") == ["Acceptance length is at least gates.min_accept_length"]
    assert "expected ≥ 2.6" in verdict.error


def test_acceptance_without_speculation_fails(write, judge_benchmark):
    write(speculative=pooled(accept_length=1.0, verify_rounds=0, correct_drafts=0))
    assert "The server verified drafts" in judge_benchmark().outcome("failed")


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": pooled(accept_length=2.6), "survival": [0.7, 0.5, 0.4]},
        {"cells": [cell(accept_length=2.25, correct_drafts=125, survival=[0.6, 0.4, 0.25])]},
    ],
)
def test_acceptance_of_another_definition_or_measurement_fails(write, judge_benchmark, changes):
    write(**changes)
    sentence, *_ = judge_benchmark().outcome("failed")
    assert sentence.startswith("Acceptance length is 1 + correct drafts / rounds")


def test_the_headline_is_of_our_draft_greedy_at_the_lowest_concurrency_over_every_set(write, judge_benchmark):
    counts = {"verify_rounds": 50, "survival": [0.9, 0.8, 0.7]}
    sets = [
        cell(set="math", correct_drafts=120, accept_length=3.4, **counts),
        cell(set="code", correct_drafts=30, accept_length=1.6, verify_rounds=50, survival=[0.3, 0.2, 0.1]),
    ]
    elsewhere = [
        *(
            cell(set=name, concurrency=4, accept_length=2.0, correct_drafts=100, survival=[0.5, 0.3, 0.2])
            for name in ("math", "code", "all")
        ),
        cell(set="all"),
    ]
    changed = {"serve": {"max_running_requests": 4}, "benchmark": asked(("math", "code"), (1, 4))}
    settings = {"sets": ["math", "code"], "concurrency": [1, 4]} | asked_for(**changed)
    write(cells=[*sets, *elsewhere], settings=settings, predicted_accept_length=None)
    verdict = judge_benchmark(**changed)
    assert verdict.error == ""


def asked(sets, concurrency=(1,)) -> dict:
    return {"sets": {name: f"{name}.jsonl" for name in sets}, "concurrency": concurrency}


def test_a_gap_to_the_prediction_is_first_a_warning(write, judge_benchmark):
    write(predicted_accept_length=2.2)
    verdict = judge_benchmark()
    assert verdict.error == ""
    assert verdict.outcome("warned") == ["Served acceptance length is within 10% of the prediction"]


def test_where_no_heldout_prompts_were_asked_nothing_is_compared_with_the_prediction_and_the_page_says_so(
    write, judge_benchmark
):
    settings = {"sets": ["math"]} | asked_for(benchmark=asked(["math"]))
    write(predicted_accept_length=None, cells=[cell(set="math")], settings=settings)
    verdict = judge_benchmark(benchmark=asked(["math"]))
    assert verdict.error == ""
    assert not [sentence for sentence in verdict.findings if "prediction" in sentence]
    assert "not compared: no held-out prompts were asked" in verdict.page


def test_a_prediction_that_held_out_prompts_lack_fails(write, judge_benchmark):
    write(predicted_accept_length=None)
    assert judge_benchmark().samples(SETTING) == ["prediction"]


def test_a_server_that_is_slower_is_a_warning(write, judge_benchmark):
    write(speedup=0.9, break_even_accept_length=2.8)
    verdict = judge_benchmark()
    assert verdict.error == ""
    faster = "The server is faster with the draft than without"
    assert verdict.outcome("warned") == [faster, f"{faster} in every cell"]


def test_text_that_differs_names_the_prompt_and_fails_in_float32(write, judge_benchmark):
    write(parted=3, lossless=False)
    verdict = judge_benchmark()
    assert verdict.samples("The text with the draft is the plain greedy text") == ["chat-2, repeat 0"]
    assert "parts at token 3" in verdict.error


def test_text_that_differs_is_a_warning_in_half_precision(write, judge_benchmark):
    write(parted=3, lossless=False, settings={"dtype": "bfloat16"})
    verdict = judge_benchmark(target={"dtype": "bfloat16"})
    assert verdict.error == ""
    assert "The text with the draft is the plain greedy text" in verdict.outcome("warned")


def test_text_that_parts_at_the_first_drafted_token_fails_in_half_precision(write, judge_benchmark):
    """The first token is the prefill's; acceptance that was made up parts every answer at the second."""
    halves = {"settings": {"dtype": "bfloat16"}, "lossless": False}
    write(first=1, parted=1, **halves)
    verdict = judge_benchmark(target={"dtype": "bfloat16"})
    assert verdict.outcome("failed") == [BEGINNING]
    assert "expected ≥ 0.25, found 0.04167" in verdict.error
    write(first=6, parted=6, **halves)
    assert judge_benchmark(target={"dtype": "bfloat16"}).error == ""


def test_answers_that_a_draft_server_ends_after_a_token_are_no_equal_beginnings(write, judge_benchmark):
    write(first=1, parted=1, tokens=1, lossless=False, settings={"dtype": "bfloat16"})
    assert judge_benchmark(target={"dtype": "bfloat16"}).outcome("failed") == [BEGINNING]


@pytest.mark.parametrize(("prompts", "severity"), [(1, "warning"), (2, "critical")])
def test_one_text_alone_that_parts_at_once_is_a_warning(prompts, severity):
    suite = figure_suite(Gates(), "warning", predicted=False, prompts=prompts)
    assert [one.severity for one in suite if one.description == BEGINNING] == [severity]


def test_acceptance_that_falls_with_the_context_warns_and_names_the_bucket(write, judge_benchmark):
    write(by_context=[bucket("up to 128", 2.6), bucket("129 to 256", 1.81), bucket("257 to 512", 1.79)])
    verdict = judge_benchmark()
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
def test_a_bucket_of_few_rounds_or_without_anything_to_lose_is_not_judged(write, judge_benchmark, buckets):
    write(by_context=buckets)
    assert FALLS not in judge_benchmark().outcome("warned")


def test_figures_measured_with_other_settings_fail_and_each_is_named(write, judge_benchmark):
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
    verdict = judge_benchmark(benchmark=other, target={"dtype": "bfloat16"})
    assert verdict.outcome("failed") == [SETTING]
    assert verdict.samples(SETTING) == ["dtype", *other, "params_sha256", "prediction"]


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, {"serve": {"extra_args": ["--disable-cuda-graph"]}}),
        ({}, {"serve": {"environment": {"NCCL_ALGO": "Ring"}}}),
        ({}, {"serve": {"context_length": 1024}}),
        ({}, {"serve": {"max_running_requests": 4}}),
        ({}, {"benchmark": {"warmup_prompts": 1}}),
        ({"benchmark": {"drafts": {"theirs": "a/draft"}}}, {"benchmark": {"drafts": {"theirs": "another/draft"}}}),
    ],
)
def test_figures_of_other_flags_or_of_other_files_of_the_same_name_fail(write, judge_benchmark, then, now):
    cells = [cell(), *([cell(draft="theirs")] if then else [])]
    write(cells=cells, settings=asked_for(**then))
    assert judge_benchmark(**then).error == ""
    verdict = judge_benchmark(**now)
    assert verdict.samples(SETTING) == ["params_sha256"]
    assert "params_sha256: measured sections benchmark and serve with SHA-256 " in verdict.error


def test_a_report_that_does_not_say_what_was_asked_for_fails(write, judge_benchmark):
    write(settings={"params_sha256": None})
    assert "params_sha256: measured absent" in judge_benchmark().error


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": 2, "draft_tokens": 3}, ["steps", "draft_tokens"]),
        ({"target": "another"}, ["target"]),
        ({"device": "cuda"}, ["device"]),
        ({"version": "0.5.16"}, ["version"]),
        ({"prompts_sha256": "0" * 64}, ["prompts_sha256"]),
    ],
)
def test_a_report_of_another_target_machine_engine_or_draft_length_fails(write, judge_benchmark, settings, named):
    write(settings=settings)
    assert judge_benchmark().samples(SETTING) == named


@pytest.mark.parametrize(
    ("record", "content", "named"),
    [
        ("target", {"target_sha256": "4" * 64}, "target_sha256"),
        ("export", DRAFT | {"model_sha256": "4" * 64}, "draft_sha256"),
        ("export", DRAFT | {"contract": {"target_sha256": "4" * 64}}, "draft_sha256"),
    ],
)
def test_a_report_of_an_earlier_target_or_draft_fails(write, judge_benchmark, record, content, named):
    """A benchmark whose servers did not start leaves the report that there was."""
    write()
    write_json(ARTIFACTS / record / "draftline.json", content)
    assert judge_benchmark().samples(SETTING) == [named]


def test_a_record_that_cannot_be_read_is_a_sentence(write, judge_benchmark):
    write()
    write_json(ARTIFACTS / "target" / "draftline.json", {})
    assert "artifacts/target/draftline.json: target_sha256: is missing. Prepare" in judge_benchmark().error


def test_a_lost_answer_is_found(write, judge_benchmark):
    write(cells=[cell(requests=3)])
    assert judge_benchmark().samples(SETTING) == ["answers"]


TWO = {"concurrency": [1, 2]}


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ([cell()], {"cells": "3", "cell heldout, 2 at once, temperature 0": "0 times"}),
        ([cell(), *[cell(concurrency=2)] * 2], {"cells": "3", "cell heldout, 2 at once, temperature 0": "2 times"}),
        (
            [cell(), *(cell(concurrency=users) for users in (2, 999))],
            {"cells": "3", "cell heldout, 999 at once, temperature 0": "1 times"},
        ),
        (
            [cell(), cell(concurrency=2, set="math")],
            {"cell heldout, 2 at once, temperature 0": "0 times", "cell math, 2 at once, temperature 0": "1 times"},
        ),
        (
            [cell(), cell(concurrency=2), cell(concurrency=2, temperature=1.0)],
            {"cell heldout, 2 at once, temperature 1": "1 times"},
        ),
    ],
)
def test_every_cell_is_there_once_and_no_other(write, judge_benchmark, cells, named):
    write(cells=cells, settings=TWO | asked_for(benchmark=TWO))
    verdict = judge_benchmark(benchmark=TWO)
    assert verdict.outcome("failed") == [SETTING]
    assert {name for name in named if name.startswith("cell ")} == {
        name for name in verdict.samples(SETTING) if name != "cells"
    }
    for name, times in named.items():
        if name != "cells":
            assert f"{name}: measured {times}" in verdict.error


def test_sampled_answers_are_expected_at_the_lowest_concurrency_alone(write, judge_benchmark):
    sampled = TWO | {"temperatures": [0.0, 1.0]}
    cells = [cell(), cell(concurrency=2), cell(temperature=1.0)]
    write(cells=cells, settings=sampled | asked_for(benchmark=sampled))
    assert judge_benchmark(benchmark=sampled).error == ""


def test_a_draft_that_lacks_a_cell_is_named(write, judge_benchmark):
    with_theirs = TWO | {"drafts": {"theirs": "someone/draft"}}
    write(
        cells=[cell(), cell(concurrency=2), cell(draft="theirs")],
        settings=TWO | asked_for(benchmark=with_theirs),
    )
    verdict = judge_benchmark(benchmark=with_theirs)
    assert verdict.samples(SETTING) == ["cells", "cell theirs: heldout, 2 at once, temperature 0"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculative": {"accept_length": 2.5}}, "speculative.tokens_per_s: is missing"),
        ({"cells": [{"draft": "speculative"}]}, "cells.0.set: is missing"),
        ({"by_context": None}, "by_context: must be a valid list (found None)"),
        ({"settings": {"sets": None}}, "settings.sets: must be a valid list"),
        ({"settings": {"concurrency": []}}, "settings.concurrency: "),
        ({"complete": False}, "complete: must be True (found False)"),
        ({"settings": {"steps": "3"}}, "settings.steps: must be a valid integer (found '3')"),
        ({"baseline": {"tokens_per_s": 0.0}}, "baseline.tokens_per_s: must be greater than 0 (found 0.0)"),
        ({"speculative": pooled(tokens_per_s=-1.0)}, "speculative.tokens_per_s: must be greater than 0"),
        (
            {"cells": [cell(baseline_tokens_per_s=dict.fromkeys(("pooled", "median", "min", "max"), -9.0))]},
            "cells.0.baseline",
        ),
        ({"cells": [cell(agreement=7.0)]}, "cells.0.agreement: must be less than or equal to 1 (found 7.0)"),
        ({"cells": [cell(agreement=None)]}, "cells.0: agreement: a greedy cell has a share of answers"),
        ({"speculative": pooled(accept_length=0)}, "speculative.accept_length: must be greater than or equal to 1"),
        ({"speedup": "1.5"}, "speedup: must be a valid number (found '1.5')"),
        ({"survival": []}, "survival: "),
        ({"cells": []}, "cells: none of draft 'speculative', greedy, at 1 at once"),
        ({"cells": [cell(draft="theirs")]}, "cells: none of draft 'speculative'"),
        ({"cells": [cell(accept_length=0)]}, "cells.0.accept_length: must be greater than or equal to 1"),
        ({"cells": [cell(temperature="0")]}, "cells.0.temperature: must be a valid number"),
        ({"cells": [cell(set=None)]}, "cells.0.set: must be a valid string (found None)"),
        ({"cells": [cell(break_even_accept_length=None)]}, "cells.0.break_even_accept_length: must be a valid number"),
        ({"cells": [cell(tokens_per_s={"pooled": 15.0})]}, "cells.0.tokens_per_s.median: is missing"),
    ],
)
def test_a_damaged_report_is_one_sentence_that_names_file_and_field(write, judge_benchmark, changes, field):
    write(**changes)
    refuses(judge_benchmark(), f"reports/benchmark.json: {field}")


def refuses(verdict, words: str) -> None:
    assert "nothing was judged" in verdict.error
    assert words in verdict.error and "Measure again: `dvc repro" in verdict.error
    assert not verdict.report["passed"]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (
            '"survival": [\n        0.7',
            '"survival": [\n        NaN',
            "cells.0.survival.0: must be a finite number (found nan)",
        ),
        ('"speedup": 1.5', '"speedup": Infinity', "speedup: must be a finite number (found inf)"),
    ],
)
def test_a_figure_that_is_not_finite_is_named(write, judge_benchmark, old, new, field):
    write()
    text = REPORT.read_text()
    assert old in text
    REPORT.write_text(text.replace(old, new))
    refuses(judge_benchmark(), field)


def test_what_was_checked_is_what_is_judged(write, monkeypatch):
    """A report that is read twice may be another the second time."""
    write()
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (real(path), path.unlink())[0])
    assert read_report()["settings"]["target"] == SETTINGS["target"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]", b"[" * 100_000, b'{"speculative": '])
def test_a_report_that_is_none_is_refused(write, judge_benchmark, content):
    write()
    assert judge_benchmark().error == ""
    REPORT.write_bytes(content)
    refuses(judge_benchmark(), "reports/benchmark.json: ")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (None, b"", "reports/benchmark_prompts.csv: no CSV file (No columns to parse from file)"),
        (None, b"\xff\xfe\x00", "reports/benchmark_prompts.csv: no CSV file ("),
        (b"domain", b"field", "reports/benchmark_prompts.csv: column domain is missing"),
        (b"chat-1,", b",", "reports/benchmark_prompts.csv:2: column prompt: a text is expected, found ''"),
        (b",15,1.5,", b",15,,", "reports/benchmark_prompts.csv:2: column speedup: a number is expected, found ''"),
        (b",15,1.5,", b",15,x,", "reports/benchmark_prompts.csv:2: column speedup: a number is expected, found 'x'"),
        (b",15,1.5,", b",inf,1.5,", "column speculative_tokens_per_s: a number is expected, found 'inf'"),
        (b",2.5,10,", b",long,10,", "column accept_length: a number is expected, found 'long'"),
        (b",10,15,1.5,\r\n", b"\r\n", "reports/benchmark_prompts.csv:2: column baseline_tokens_per_s: a number"),
    ],
)
def test_a_damaged_table_of_answers_is_one_sentence_that_names_line_and_column(write, judge_benchmark, old, new, words):
    write()
    assert judge_benchmark().report["passed"]
    content = PROMPTS.read_bytes()
    assert old is None or old in content
    PROMPTS.write_bytes(new if old is None else content.replace(old, new))
    refuses(judge_benchmark(), words)


def test_a_table_without_an_answer_fails(write, judge_benchmark):
    write()
    PROMPTS.write_bytes(PROMPTS.read_bytes().splitlines(keepends=True)[0])
    verdict = judge_benchmark()
    assert "There is at least one answer" in verdict.outcome("failed")


def test_a_folder_in_a_files_place_and_a_file_that_is_not_there_are_sentences(write, judge_benchmark):
    write()
    PROMPTS.unlink()
    assert "reports/benchmark_prompts.csv: not there" in judge_benchmark().error
    PROMPTS.mkdir()
    assert "reports/benchmark_prompts.csv: cannot be read: Is a directory" in judge_benchmark().error


def test_a_gate_that_breaks_off_leaves_no_earlier_verdict(write, judge_benchmark, monkeypatch):
    write()
    assert judge_benchmark().report["passed"]

    def breaks_off(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.gates.gate.judge", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        judge_benchmark()
    assert list(GATES.iterdir()) == []


def test_planted_settings_are_those_of_the_default_parameters(params):
    """Else the tests above would say nothing of what a run asks for."""
    assert SETTINGS["repeats"] == params.benchmark.repeats
    assert SETTINGS["concurrency"] == list(params.benchmark.concurrency)
