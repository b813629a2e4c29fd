"""The prediction that a benchmark is held against, read before a server is started, and by whoever else reads it."""

import json
from pathlib import Path

import pytest

from tasks.benchmark.__main__ import prediction
from tasks.common.errors import DraftlineError
from tasks.common.params import Params


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Writes reports/train_draft.json."""
    monkeypatch.chdir(tmp_path)
    Path("reports").mkdir()
    return Path("reports/train_draft.json").write_text


def served(steps: int) -> Params:
    return Params.model_validate(
        {"serve": {"num_steps": steps, "num_draft_tokens": steps + 1}, "train_draft": {"ttt_length": 7}}
    )


@pytest.mark.parametrize(("steps", "expected"), [(1, 1.5), (2, 2.0), (3, 2.25)])
def test_it_is_that_of_training_for_the_steps_that_are_served(trained, steps, expected):
    trained('{"predicted_accept_lengths": [1.5, 2.0, 2.25]}')
    assert prediction(served(steps)) == expected


def test_a_draft_that_was_trained_for_fewer_steps_is_said(trained):
    trained('{"predicted_accept_lengths": [1.5, 2.0, 2.25]}')
    with pytest.raises(
        DraftlineError, match=r"chains of 4 steps, only for up to 3.*Set serve.num_steps to that at most"
    ):
        prediction(served(4))


@pytest.mark.parametrize("value", [None, "x", 0, -1.0, True, float("nan"), float("inf"), 10**400])
def test_a_prediction_that_is_none_is_named_with_file_and_field(trained, value):
    trained(json.dumps({"predicted_accept_lengths": [1.5, value, 2.25]}))
    with pytest.raises(
        DraftlineError, match=r"^reports/train_draft\.json: predicted_accept_lengths\.1: must be .*Train again"
    ):
        prediction(Params())


@pytest.mark.parametrize("text", ["[]", "{}", '{"predicted_accept_length": 2.25}', "", '{"predicted', "[" * 100_000])
def test_a_report_that_is_none_is_a_sentence(trained, text):
    trained(text)
    with pytest.raises(DraftlineError, match=r"^reports/train_draft\.json: .*Train again: `dvc repro"):
        prediction(Params())


def test_where_other_questions_are_asked_nothing_was_predicted_and_nothing_is_read(trained):
    trained("[]")
    assert prediction(Params.model_validate({"benchmark": {"sets": {"math": "math.jsonl"}}})) is None
