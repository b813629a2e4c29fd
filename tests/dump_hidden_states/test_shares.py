"""Whose shards are whose: what the environment may say, and that no two processes write the same ones."""

import os
import socket

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.responses import RESPONSES, Response
from tasks.dump_hidden_states.dump import dump
from tasks.dump_hidden_states.locks import working_on
from tasks.dump_hidden_states.share import Share


def set_environment(monkeypatch, rank: str | None, ranks: str | None) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("rank", "ranks", "share"), [(None, None, (0, 1)), ("0", "1", (0, 1)), ("3", "4", (3, 4))])
def test_the_environment_has_rank_and_number_of_ranks_or_neither(monkeypatch, rank, ranks, share):
    set_environment(monkeypatch, rank, ranks)
    assert Share.of_environment() == Share(*share)


@pytest.mark.parametrize(
    ("rank", "ranks", "found"),
    [
        (None, "4", "RANK is not set, WORLD_SIZE is '4'"),
        ("2", None, "RANK is '2', WORLD_SIZE is not set"),
        ("4", "4", "RANK is '4', WORLD_SIZE is '4'"),
        ("-1", "4", "RANK is '-1'"),
        ("0", "0", "WORLD_SIZE is '0'"),
        ("abc", "4", "RANK is 'abc'"),
        ("", "", "RANK is '', WORLD_SIZE is ''"),
    ],
)
def test_what_is_no_rank_is_refused(tiny_params, tmp_path, monkeypatch, rank, ranks, found):
    monkeypatch.chdir(tmp_path)
    set_environment(monkeypatch, rank, ranks)
    with pytest.raises(DraftlineError, match=rf"environment: .*{found}.*set both, as torchrun does, or neither\.$"):
        dump(tiny_params())


def test_a_share_that_somebody_computes_is_refused_and_his_process_named(tiny_params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = rf"another dump \(pid {os.getpid()} on {socket.gethostname()}\) works on these shards, as rank 0 of 1"
    with working_on(Share(0, 1)), pytest.raises(DraftlineError, match=named):
        dump(tiny_params())
    with working_on(Share(0, 1)):  # it has ended
        pass
    assert not HIDDEN_STATES.exists()


def test_other_ranks_of_one_dump_work_beside_each_other_and_not_beside_another_dump(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with working_on(Share(0, 3)), working_on(Share(2, 3)):
        with (
            pytest.raises(DraftlineError, match="another dump, of 3 ranks and not 2, works on these shards"),
            working_on(Share(1, 2)),
        ):
            pass
        with working_on(Share(1, 3)):
            pass
    with working_on(Share(1, 2)):
        pass


def test_a_lock_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").write_text("no folder")
    with (
        pytest.raises(DraftlineError, match=r"artifacts/hidden_states\.ranks\.lock: cannot be written"),
        working_on(Share(0, 1)),
    ):
        pass


@pytest.mark.parametrize(
    ("prompt", "output", "wrong"),
    [
        ([3, 320], [7], "token id 320 is outside the vocabulary, 0 to 319"),
        ([3], [-1], "token id -1 is outside"),
        ([2**31], [7], "token id 2147483648 is outside"),
        ([3.5], [7], "not lists of integers"),
        ([True], [7], "not lists of integers"),
        (None, [7], "not lists of integers"),
        ([], [], "it has no tokens"),
    ],
)
def test_an_answer_that_the_target_cannot_read_is_named_before_anything_is_computed(
    project, tiny_params, prompt, output, wrong
):
    write({"heldout": [("h", [3], [4])], "train": [("good", [3], [4]), ("bad", prompt, output)]})
    with pytest.raises(DraftlineError, match=rf"responses/train\.jsonl, sample bad: .*{wrong}"):
        dump(tiny_params())
    assert not HIDDEN_STATES.exists()


@pytest.mark.parametrize(("train", "of"), [(["a", "b", "a"], "train"), (["a", "h"], "heldout")])
def test_an_id_that_is_taken_is_named(project, tiny_params, train, of):
    write({"heldout": [("h", [3], [4])], "train": [(name, [3], [4]) for name in train]})
    with pytest.raises(DraftlineError, match=f"sample {train[-1]}: its id is taken, by another sample of {of}"):
        dump(tiny_params())


def write(answers: dict[str, list[tuple]]) -> None:
    for split, rows in answers.items():
        responses = (Response(name, "", [], prompt, output, "", "stop") for name, prompt, output in rows)
        write_jsonl(RESPONSES / f"{split}.jsonl", (response.to_row() for response in responses))
