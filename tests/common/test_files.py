"""Files that appear whole or not at all."""

import errno
from collections import namedtuple

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, read_jsonl, replacing, write_json


@pytest.mark.parametrize(
    ("error", "free"),
    [(OSError(errno.ENOSPC, "No space left on device"), 2**30), (RuntimeError("unexpected pos"), 0)],
)
def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(tmp_path, monkeypatch, error, free):
    monkeypatch.setattr("shutil.disk_usage", lambda _: namedtuple("Usage", "free")(free))
    path = tmp_path / "state.pt"
    path.write_text("old")
    with (
        pytest.raises(
            DraftlineError,
            match=r"state.pt: cannot be written, the disk is full\. .*run it again: finished stages are kept",
        ),
        replacing(path) as partial,
    ):
        partial.write_text("half of the n")
        raise error
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]
    assert path.read_text() == "old"


def test_another_error_stays_what_it_is(tmp_path):
    with pytest.raises(ValueError, match="a mistake"), replacing(tmp_path / "state.pt"):
        raise ValueError("a mistake")


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "reports").write_text("a file in the folder's place")
    with pytest.raises(DraftlineError, match=r"reports/x.json: cannot be written: File exists\."):
        write_json(tmp_path / "reports" / "x.json", {})


@pytest.mark.parametrize("read", [read_json, lambda path: list(read_jsonl(path))])
def test_json_nested_deeper_than_can_be_read_is_one_sentence(tmp_path, read):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(DraftlineError, match=r"x\.json.*: not valid JSON"):
        read(tmp_path / "x.json")


def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(DraftlineError, match=r"x.json: cannot be written: Is a directory\."):
        write_json(tmp_path / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
