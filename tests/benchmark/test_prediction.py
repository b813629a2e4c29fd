"""The prediction that a benchmark is held against, read before a server is started."""

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


def test_it_is_that_of_training(trained):
    trained('{"predicted_accept_length": 2.25, "num_steps": 3}')
    assert prediction(Params()) == 2.25


@pytest.mark.parametrize("value", [None, "x", 0, -1.0, True, float("nan"), float("inf"), 10**400])
def test_a_prediction_that_is_none_is_named_with_file_and_field(trained, value):
    trained(json.dumps({"predicted_accept_length": value}))
    with pytest.raises(
        DraftlineError, match=r"^reports/train_draft\.json: predicted_accept_length: must be .*Train again"
    ):
        prediction(Params())


@pytest.mark.parametrize("text", ["[]", "{}", "", '{"predicted', "[" * 100_000])
def test_a_report_that_is_none_is_a_sentence(trained, text):
    trained(text)
    with pytest.raises(DraftlineError, match=r"^reports/train_draft\.json: .*Train again: `dvc repro"):
        prediction(Params())


def test_where_other_questions_are_asked_nothing_was_predicted_and_nothing_is_read(trained):
    trained("[]")
    assert prediction(Params.model_validate({"benchmark": {"sets": {"math": "math.jsonl"}}})) is None
