"""A training that has ended is not repeated for a report that DVC removed, and is for anything that would change it."""

import os

import pytest

import tasks.train_draft.finished as finished
from tasks.common.files import read_json
from tasks.train_draft.__main__ import REPORT, main
from tests.silent_tracker import SilentTracker
from tests.train_draft.conftest import DRAFT, SETTINGS


@pytest.fixture
def trained(params):
    """The report of a run, lost, and when its draft was written."""
    main(params, SilentTracker())
    report = read_json(REPORT)
    REPORT.unlink()
    return report, (DRAFT / "draft.safetensors").stat().st_mtime_ns


def trains_anew(params, trained) -> bool:
    main(params, SilentTracker())
    assert REPORT.exists()
    return (DRAFT / "draft.safetensors").stat().st_mtime_ns != trained[1]


def test_the_report_is_written_again_and_nothing_else(params, trained, capsys):
    assert not trains_anew(params, trained)
    assert read_json(REPORT) == trained[0]
    assert "trained already" in capsys.readouterr().out


def test_another_number_of_processes_is_no_other_training(params, trained):
    settings = params.train_draft.model_copy(update={"parallel": "fsdp", "checkpoint_every": 3})
    assert not trains_anew(params.model_copy(update={"train_draft": settings}), trained)


def test_other_settings_are(params, trained):
    longer = params.train_draft.model_copy(update={"max_steps": SETTINGS["max_steps"] + 2})
    assert trains_anew(params.model_copy(update={"train_draft": longer}), trained)
    assert read_json(REPORT) != trained[0]


@pytest.mark.parametrize("name", ["draft.safetensors", "vocab_map.safetensors", "draft.json"])
def test_a_result_that_is_not_whole_is_trained_again(params, trained, name):
    os.truncate(DRAFT / name, 40)
    assert trains_anew(params, trained)


def test_so_is_what_other_code_or_other_versions_made(params, trained, monkeypatch):
    monkeypatch.setattr(finished, "result_versions", lambda: {"torch": "another"})
    assert trains_anew(params, trained)
    monkeypatch.setattr(finished, "_CODE", DRAFT)
    again = None, (DRAFT / "draft.safetensors").stat().st_mtime_ns
    assert trains_anew(params, again)


def test_deleting_the_record_trains_anew(params, trained):
    (DRAFT / finished.FINISHED).unlink()
    assert trains_anew(params, trained)
