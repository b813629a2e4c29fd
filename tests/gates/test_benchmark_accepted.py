"""A benchmark against the last one that was accepted, in a real repository."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json, write_json
from tasks.common.params import Gates
from tasks.gates.accepted_benchmark import compare
from tests.planted_benchmark import asked_for, cell, pooled, write_benchmark

REPORT = REPORTS / "benchmark.json"
NO_LOWER = "Acceptance length is at most gates.max_accept_length_drop below that of the accepted report"
NOTHING = "nothing: no reports/benchmark.json is committed"


def git(*arguments: str) -> str:
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def accept() -> str:
    """Commit the report; returns the commit."""
    git("add", REPORT.as_posix())
    git("commit", "--message", "a benchmark")
    return git("log", "-1", "--format=%h")


def write(correct: int = 150, **settings) -> None:
    """A sound report of so many correct drafts in 100 rounds, on one set."""
    write_sets({"heldout": correct}, **settings)


def write_sets(correct: dict[str, int], **settings) -> None:
    """The same for several sets, of 100 rounds each, and all of them pooled."""
    cells = [cell(set=name, **_counts(100, drafts)) for name, drafts in correct.items()]
    counts = _counts(100 * len(correct), sum(correct.values()))
    if len(correct) > 1:
        cells.append(cell(set="all", **counts))
    write_benchmark(
        settings={"sets": list(correct)} | settings,
        speculative=pooled(**counts),
        survival=counts["survival"],
        cells=cells,
        predicted_accept_length=counts["accept_length"] if list(correct) == ["heldout"] else None,
    )


def _counts(rounds: int, correct: int) -> dict:
    share = correct / rounds
    return {
        "verify_rounds": rounds,
        "correct_drafts": correct,
        "accept_length": 1 + share,
        "survival": [share / 3] * 3,
    }


def held_against(verdict) -> str:
    return re.search(r"<b[^>]*>([^<]*)</b>\s*<span>held against", verdict.page)[1]


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("GIT_CONFIG_GLOBAL", os.devnull), ("GIT_CONFIG_NOSYSTEM", "1"), ("LC_ALL", "C")):
        monkeypatch.setenv(name, value)  # a safe.directory of this machine, or its language, is no part of the test
    git("init")


def test_a_first_benchmark_is_held_against_nothing(judge_benchmark):
    write()
    verdict = judge_benchmark()
    assert (verdict.error, held_against(verdict)) == ("", NOTHING)


def test_the_page_names_the_report_that_was_compared_with(judge_benchmark):
    write()
    commit = accept()
    git("commit", "--allow-empty", "--message", "something else")
    verdict = judge_benchmark()
    assert (verdict.error, held_against(verdict)) == ("", f"commit {commit}, acceptance length 2.5")
    assert NO_LOWER in verdict.page


def test_a_fall_beyond_the_limit_fails_with_both_figures_and_how_to_accept_it(judge_benchmark):
    write(correct=150)
    accept()
    write(correct=137)  # 2.37 of 2.5: 5.2 % less
    verdict = judge_benchmark()
    assert verdict.outcome("failed") == [NO_LOWER]
    assert "all questions: drop 0.052; 2.37, was 2.5" in verdict.error
    assert "accept it: `git add reports/benchmark.json`, `git commit`, `dvc repro`" in verdict.error
    assert "measured against nothing: `git rm --cached reports/benchmark.json`" in verdict.error


def test_a_fall_within_the_limit_passes_and_the_limit_is_the_parameters(judge_benchmark):
    write(correct=150)
    accept()
    write(correct=138)  # 2.38 of 2.5: 4.8 % less
    assert judge_benchmark().error == ""
    assert judge_benchmark(gates={"max_accept_length_drop": 0.04}).outcome("failed") == [NO_LOWER]


def test_a_rise_passes(judge_benchmark):
    write(correct=100)
    accept()
    write(correct=150)
    assert judge_benchmark().error == ""


def test_a_set_that_falls_is_named_though_all_together_do_not(judge_benchmark):
    asked = {"sets": {name: f"{name}.jsonl" for name in ("code", "math")}}
    write_sets({"code": 100, "math": 200})
    accept()
    write_sets({"code": 85, "math": 215}, **asked_for(benchmark=asked))
    verdict = judge_benchmark(benchmark=asked)
    assert verdict.outcome("failed") == [NO_LOWER]
    assert verdict.samples(NO_LOWER) == ["code"]


def test_all_questions_and_each_set_are_compared_once():
    write_sets({"code": 100, "math": 200})
    accept()
    assert list(compare(read_json(REPORT), Gates()).table.frame["id"]) == ["all questions", "code", "math"]
    write(correct=150)
    accept()
    assert list(compare(read_json(REPORT), Gates()).table.frame["id"]) == ["all questions"]


def test_a_lower_report_that_is_committed_is_the_new_measure(judge_benchmark):
    write(correct=150)
    accept()
    write(correct=100)
    assert judge_benchmark().outcome("failed") == [NO_LOWER]
    git("add", REPORT.as_posix())
    assert judge_benchmark().outcome("failed") == [NO_LOWER]  # staged is not committed
    commit = accept()
    verdict = judge_benchmark()
    assert (verdict.error, held_against(verdict)) == ("", f"commit {commit}, acceptance length 2")


def test_a_report_that_is_forgotten_is_no_measure(judge_benchmark):
    write(correct=150)
    accept()
    write(correct=100)
    git("rm", "--cached", REPORT.as_posix())
    git("commit", "--message", "another model")
    verdict = judge_benchmark()
    assert (verdict.error, held_against(verdict)) == ("", NOTHING)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 5}, "has steps 5"),
        ({"topk": 2}, "has topk 2"),
        ({"draft_tokens": 8}, "has draft_tokens 8"),
        ({"max_new_tokens": 256}, "has max_new_tokens 256"),
        ({"dtype": "bfloat16"}, "has dtype bfloat16"),
        ({"temperature": 1.0}, "has temperature 1.0"),
        ({"prompts_sha256": "ab"}, "has prompts_sha256 ab"),
        ({"target_sha256": "ab"}, "has target_sha256 ab"),
        ({"sets": ["math", "code"]}, "has sets code, math"),
    ],
)
def test_an_acceptance_length_of_other_settings_is_not_compared(settings, said):
    write(correct=290, **settings)
    commit = accept()
    write(correct=100)
    compared = compare(read_json(REPORT), Gates())
    assert (compared.against, compared.table) == (f"nothing: commit {commit} {said}", None)


def test_the_same_weights_from_another_place_are_the_same_target():
    write(target="/models/before")
    accept()
    write()
    assert compare(read_json(REPORT), Gates()).table is not None


def test_other_flags_of_the_servers_do_not_make_another_acceptance_length(judge_benchmark):
    write(correct=290, **asked_for(serve={"extra_args": ["--tp-size", "2"]}))
    accept()
    write(correct=100)
    assert judge_benchmark().outcome("failed") == [NO_LOWER]


def test_that_it_was_not_compared_stands_on_the_page(judge_benchmark):
    write(correct=290, steps=5)
    commit = accept()
    write(correct=100)
    verdict = judge_benchmark()
    assert (verdict.error, held_against(verdict)) == ("", f"nothing: commit {commit} has steps 5")


@pytest.mark.parametrize(
    "report", [{"speculative": {"accept_length": 2.9}}, {"settings": {"concurrency": [1]}, "cells": []}]
)
def test_a_report_of_an_older_version_is_no_measure(report):
    write_json(REPORT, report)
    accept()
    write()
    assert (
        compare(read_json(REPORT), Gates()).against
        == "nothing: the reports/benchmark.json committed is of another version"
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "", "not valid JSON"),
        (lambda text: text[:200], "not valid JSON"),
        (lambda text: "<<<<<<< HEAD\n" + text, "not valid JSON"),
        (lambda text: "[" * 100_000, "not valid JSON"),
        (lambda text: "[]", "a JSON object is expected (found [])"),
        (lambda text: json.dumps(json.loads(text) | {"cells": None}), "cells: must be a valid list (found None)"),
        (
            lambda text: json.dumps(json.loads(text) | {"speculative": {}, "cells": None}),
            "cells: must be a valid list (found None)",
        ),
        (lambda text: json.dumps(json.loads(text) | {"settings": None}), "settings: a JSON object is expected"),
        (
            lambda text: json.dumps(json.loads(text) | {"speculative": {"accept_length": 0}}),
            "speculative.accept_length: must be greater than or equal to 1 (found 0)",
        ),
    ],
)
def test_a_damaged_report_that_is_committed_is_an_error_that_says_how_to_mend_it(judge_benchmark, damage, said):
    write()
    REPORT.write_text(damage(REPORT.read_text()))
    commit = accept()
    write(correct=100)
    error = judge_benchmark().error
    assert f"reports/benchmark.json as commit {commit} has it: " in error and said in error
    assert "`git add reports/benchmark.json`, `git commit`, `dvc repro`" in error
    accept()
    assert judge_benchmark().error == ""


def test_bytes_that_are_no_text_are_such_damage(judge_benchmark):
    write()
    REPORT.write_bytes(b"\xff\xfe{}")
    accept()
    write()
    assert "not UTF-8" in judge_benchmark().error


def test_what_later_stages_read_says_nothing_of_git_while_the_gate_passes(judge_benchmark):
    write()
    before = judge_benchmark().report
    accept()
    assert judge_benchmark().report == before


def test_outside_a_repository_there_is_nothing_to_compare_with(tmp_path, monkeypatch):
    write()
    shutil.rmtree(".git")
    assert compare(read_json(REPORT), Gates()).against == NOTHING
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compare(read_json(REPORT), Gates()).against == NOTHING


def test_on_a_branch_without_a_commit_there_is_nothing_to_compare_with():
    write()
    accept()
    git("checkout", "--quiet", "--orphan", "new")
    assert compare(read_json(REPORT), Gates()).against == NOTHING


def test_a_commit_that_no_branch_names_is_compared_with():
    write()
    commit = accept()
    git("checkout", "--quiet", "--detach")
    assert compare(read_json(REPORT), Gates()).against.startswith(f"commit {commit}")


def blob() -> Path:
    """The committed report in git's store."""
    name = git("rev-parse", f"HEAD:{REPORT.as_posix()}")
    return Path(".git/objects", name[:2], name[2:])


def truncate(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda patch: patch.setenv("PATH", "nowhere"), "git cannot be started (No such file or directory)"),
        (lambda patch: patch.setenv("GIT_DIR", "nowhere"), "not a git repository: 'nowhere'"),
        (lambda patch: patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1"), "detected dubious ownership"),
        (lambda patch: truncate(blob()), "`git cat-file` says: "),
        (lambda patch: blob().unlink(), "`git cat-file` says: "),
        (lambda patch: Path(".git/HEAD").write_text("junk"), "not a git repository"),
        (lambda patch: Path(".git", git("symbolic-ref", "HEAD")).write_text(""), "No such ref: HEAD"),
    ],
)
def test_what_git_cannot_answer_does_not_pass_for_nothing(monkeypatch, harm, said):
    write(correct=150)
    accept()
    write(correct=100)
    harm(monkeypatch)
    with pytest.raises(DraftlineError, match="as it is committed: git does not give it") as error:
        compare(read_json(REPORT), Gates())
    assert said in str(error.value)


def test_git_may_quote_a_path_in_any_encoding(monkeypatch, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet")
    write(correct=150)
    accept()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(DraftlineError, match="detected dubious ownership"):
        compare(read_json(REPORT), Gates())


def test_a_run_in_a_folder_of_a_larger_repository_has_a_report_of_its_own(judge_benchmark, monkeypatch, tmp_path):
    write(correct=290)
    accept()
    (tmp_path / "drafts").mkdir()
    monkeypatch.chdir(tmp_path / "drafts")
    write(correct=150)
    assert held_against(judge_benchmark()) == NOTHING
    commit = accept()
    assert read_json(REPORT)["speculative"]["accept_length"] == 2.5
    assert held_against(judge_benchmark()) == f"commit {commit}, acceptance length 2.5"
