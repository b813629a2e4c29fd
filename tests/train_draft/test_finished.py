"""A training that has ended is not repeated for a report that DVC removed nor lost to a slip, and is for anything that would
change it."""

import os
from pathlib import Path

import pytest

import tasks.train_draft.finished as finished
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.train_draft.__main__ import REPORT, main
from tasks.train_draft.checkpoints import Checkpoints
from tests.silent_tracker import SilentTracker
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, SETTINGS, files, train

ASIDE = DRAFT.with_name("draft_finished")


@pytest.fixture
def trained(params):
    """The report of a run, lost, and when its draft was written."""
    main(params, SilentTracker())
    report = read_json(REPORT)
    REPORT.unlink()
    return report, (DRAFT / "draft.safetensors").stat().st_mtime_ns


def with_rate(params, rate: float):
    """The same run but for its learning rate."""
    return params.model_copy(update={"train_draft": params.train_draft.model_copy(update={"learning_rate": rate})})


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


def test_nor_is_another_number_of_steps_served(params, trained):
    serve = params.serve.model_copy(update={"num_steps": 1, "num_draft_tokens": 2})
    assert not trains_anew(params.model_copy(update={"serve": serve}), trained)
    assert read_json(REPORT) == trained[0]


def test_other_settings_are(params, trained):
    longer = params.train_draft.model_copy(update={"max_steps": SETTINGS["max_steps"] + 2})
    assert trains_anew(params.model_copy(update={"train_draft": longer}), trained)
    assert read_json(REPORT) != trained[0]


@pytest.mark.parametrize("name", ["draft.safetensors", "vocab_map.safetensors", "draft.json"])
def test_a_result_that_is_not_whole_is_trained_again(params, trained, name):
    os.truncate(DRAFT / name, 40)
    assert trains_anew(params, trained)


def test_so_is_what_other_versions_made(params, trained, monkeypatch):
    monkeypatch.setattr(finished, "result_versions", lambda: {"torch": "another"})
    assert trains_anew(params, trained)


def test_other_code_makes_another_training_where_dvc_says_that_its_result_depends_on_it(params):
    dvc_yaml, package, module = Path("dvc.yaml"), Path("tasks/train_draft"), Path("tasks/common/packing.py")
    package.mkdir(parents=True)
    module.parent.mkdir()
    dvc_yaml.write_text(f"stages: {{train_draft: {{deps: [artifacts/target, {module}, {package}]}}}}")
    for path in (module, package / "loss.py", module.with_name("console.py")):
        path.write_text("")
    main(params, SilentTracker())
    for path, is_another in ((module, True), (package / "loss.py", True), (module.with_name("console.py"), False)):
        before = None, (DRAFT / "draft.safetensors").stat().st_mtime_ns
        path.write_text("changed = True")
        assert trains_anew(params, before) == is_another


def test_deleting_the_record_trains_anew(params, trained):
    (DRAFT / finished.FINISHED).unlink()
    assert trains_anew(params, trained)


@pytest.mark.parametrize("start", [main, lambda params, _: train(params, until=3)], ids=["to the end", "and killed"])
def test_a_slip_in_the_settings_that_began_to_train_costs_nothing(params, trained, start, capsys):
    result = files()
    start(with_rate(params, 0.5), SilentTracker())
    assert f"It is kept in {ASIDE}" in " ".join(capsys.readouterr().out.split())
    assert not trains_anew(params, trained)
    assert files() == result
    assert read_json(REPORT) == trained[0]


def test_what_the_slip_had_trained_is_kept_as_well(params, trained, capsys):
    slip = with_rate(params, 0.5)
    train(slip, until=3)
    main(params, SilentTracker())
    assert not CHECKPOINTS.exists()
    REPORT.unlink()
    main(slip, SilentTracker())
    assert "resuming after step 2 of 8" in capsys.readouterr().out
    of_slip = None, (DRAFT / "draft.safetensors").stat().st_mtime_ns
    assert not trains_anew(params, trained)
    assert not trains_anew(slip, of_slip)


def test_of_results_set_aside_two_are_kept_and_none_goes_for_the_one_that_comes_back(params, trained):
    for rate in (0.1, 0.2):
        main(with_rate(params, rate), SilentTracker())
    assert not trains_anew(params, trained)
    for rate in (0.3, 0.4):
        main(with_rate(params, rate), SilentTracker())
    assert len(list(ASIDE.iterdir())) == 2
    assert not trains_anew(params, trained)


def test_checkpoints_that_a_killed_run_had_not_removed_go_with_the_next_start(params, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(Checkpoints, "remove", lambda _: None)
        main(params, SilentTracker())
    assert CHECKPOINTS.exists()
    assert not trains_anew(params, (None, (DRAFT / "draft.safetensors").stat().st_mtime_ns))
    assert not CHECKPOINTS.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[]"),
        lambda path: os.truncate(path, 300),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text(path.read_text().replace('"step": 8', '"step": 9')),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "no field", "a list", "cut off", "no text", "another number", "a folder"],
)
def test_a_damaged_record_is_an_error_and_the_draft_beside_it_stays(params, trained, damage):
    damage(DRAFT / finished.FINISHED)
    for settings in (params, with_rate(params, 0.5)):
        with pytest.raises(
            DraftlineError, match=r"finished\.json: .*\. It does not say what made .*dvc checkout --force .*delete it"
        ):
            main(settings, SilentTracker())
    assert (DRAFT / "draft.safetensors").stat().st_mtime_ns == trained[1]


def test_what_is_not_taken_any_more_is_said(params, trained, capsys):
    (DRAFT / "draft.json").unlink()
    main(params, SilentTracker())
    assert "draft.json changed or gone since the training ended" in capsys.readouterr().out
    assert not ASIDE.exists()
