"""Checkpoints: what is on the disk after any death, and what is taken up again."""

from pathlib import Path

import pytest
import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.train_draft.checkpoints import Checkpoints
from tasks.train_draft.prepare import prepare_training
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, train


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "draft" / "checkpoints"


CONTRACT = Contract(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=4,
    vocab_size=50,
    aux_layer_ids=(1, 3),
    last_is_normed=True,
    target_sha256="t",
    tokenizer_sha256="k",
)


def state(step: int, best_step: int | None = None) -> dict:
    return {
        "weights": torch.full((50_000,), float(step)),
        "best_step": best_step,
        "vocab_map_sha256": "v",
        "contract": CONTRACT.model_dump(mode="json"),
    }


def save(checkpoints: Checkpoints, *steps: int, best_step: int | None = None) -> None:
    for step in steps:
        checkpoints.save(step, state(step, best_step))


def newest(folder, key: str = "k" * 64) -> float | None:
    """The step whose state is found by a new process."""
    checkpoints = Checkpoints(folder, key)
    step = checkpoints.newest("v")
    return None if step is None else checkpoints.load(step, CONTRACT)["weights"][0].item()


def test_the_newest_two_are_kept(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1, 2, 3, 4)
    assert newest(folder) == 4
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["run.json", "step-00000003.json", "step-00000003.pt", "step-00000004.json", "step-00000004.pt"]


def test_one_without_a_record_takes_no_place_among_the_two(folder):
    save(Checkpoints(folder, "k" * 64), 1, 2)
    (folder / "step-00000003.pt").write_bytes(b"its writer died before the record")
    again = Checkpoints(folder, "k" * 64)
    assert again.newest("v") == 2
    save(again, 4)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["step-00000002.pt", "step-00000004.pt"]
    cut_off(folder / "step-00000004.pt")
    assert newest(folder) == 2


def test_a_checkpoint_that_is_written_again_counts_once(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1, 2, 2)
    cut_off(folder / "step-00000002.pt")
    assert newest(folder) == 1


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, empty, remove])
@pytest.mark.parametrize("name", ["step-00000002.pt", "step-00000002.json", "best-00000002.safetensors"])
def test_a_damaged_one_is_passed_over_with_a_line(folder, damage, name, capsys):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1)
    checkpoints.save_best(2, {"w": torch.zeros(1000)})
    save(checkpoints, 2, best_step=2)
    damage(folder / name)
    assert newest(folder) == 1
    said = capsys.readouterr().out
    assert "going back to the one before" in said or (name == "step-00000002.pt" and damage is remove)


def test_a_best_draft_is_known_again_after_a_new_start(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    checkpoints.save_best(1, {"w": torch.zeros(1000)})
    save(checkpoints, 2, best_step=1)
    again = Checkpoints(folder, "k" * 64)
    again.load(again.newest("v"), CONTRACT)
    save(again, 3, 4, 5, best_step=1)
    assert newest(folder) == 5


def test_a_full_disk_is_said_and_the_earlier_checkpoint_stays(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1)
    (folder / ".step-00000002.pt.partial").symlink_to("/dev/full")  # every write there finds no room
    with pytest.raises(DraftlineError, match=r"step-00000002.pt: cannot be written, the disk is full"):
        save(checkpoints, 2)
    assert newest(folder) == 1
    save(checkpoints, 2)
    assert newest(folder) == 2


def test_what_a_killed_writer_left_is_removed(folder):
    save(Checkpoints(folder, "k" * 64), 1)
    (folder / ".step-00000002.pt.partial").write_bytes(b"half")
    assert newest(folder) == 1
    assert not list(folder.glob(".*"))


def test_those_of_other_settings_are_set_aside_and_found_by_theirs(folder, capsys):
    save(Checkpoints(folder, "a" * 64), 5)
    assert newest(folder, "b" * 64) is None
    assert "starting anew. They are kept in" in capsys.readouterr().out
    save(Checkpoints(folder, "b" * 64), 2)
    assert newest(folder, "a" * 64) == 5
    assert newest(folder, "b" * 64) == 2


def test_of_what_is_set_aside_two_are_kept(folder):
    for key in "abcde":
        save(Checkpoints(folder, key * 64), 1)
    assert len(list((folder.parents[1] / "draft_set_aside").iterdir())) == 2
    assert newest(folder, "d" * 64) == 1
    assert newest(folder, "a" * 64) is None


def test_a_file_beside_what_is_set_aside_stays_and_counts_for_none(folder):
    save(Checkpoints(folder, "a" * 64), 1)
    save(Checkpoints(folder, "b" * 64), 1)
    aside = folder.parent.with_name(f"{folder.parent.name}_set_aside")
    (aside / ".DS_Store").touch()
    save(Checkpoints(folder, "c" * 64), 1)
    (aside / ".DS_Store").touch()
    assert newest(folder, "a" * 64) == 1
    assert (aside / ".DS_Store").exists()


def test_none_goes_for_the_one_that_is_taken_up(folder):
    for key in "abc":
        save(Checkpoints(folder, key * 64), 1)
    assert newest(folder, "a" * 64) == 1
    assert newest(folder, "b" * 64) == 1


def test_another_vocabulary_map_is_refused(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1)
    with pytest.raises(
        DraftlineError, match=r"vocabulary map v, this run's is w: the rows of the head would mean other"
    ):
        checkpoints.newest("w")


def test_another_contract_is_refused(folder):
    checkpoints = Checkpoints(folder, "k" * 64)
    save(checkpoints, 1)
    other = CONTRACT.model_copy(update={"aux_layer_ids": (1, 4)})
    with pytest.raises(
        DraftlineError, match=r"step-00000001.pt: trained under .* aux_layer_ids \[1, 3\], not \[1, 4\]\. Delete"
    ):
        checkpoints.load(1, other)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda run: run.write_text(""), lambda run: run.write_text("{}")])
def test_checkpoints_of_which_nobody_knows_whose_they_are_are_kept_aside(params, spoil, capsys):
    train(params, until=5)
    spoil(CHECKPOINTS / "run.json")
    trainer, _ = prepare_training(params, DRAFT)
    assert trainer.step == 0
    aside = DRAFT.with_name("draft_set_aside") / "of_unknown_run"
    assert f"starting anew. They are kept in {aside}" in " ".join(capsys.readouterr().out.split())
    assert (aside / "step-00000004.pt").exists()


@pytest.mark.parametrize("record", ["[1]", "null", "{}", '{"sha256": "x"}', "", "{"])
def test_a_damaged_record_is_passed_over(params, record, capsys):
    train(params, until=5)
    (CHECKPOINTS / "step-00000004.json").write_text(record)
    assert prepare_training(params, DRAFT)[0].step == 2
    assert "step-00000004.pt: cut off, changed or gone" in capsys.readouterr().out


def test_what_only_looks_like_a_checkpoint_is_none(params):
    train(params, until=5)
    (CHECKPOINTS / "step-latest.pt").write_bytes(b"x")
    (CHECKPOINTS / "step-00000099.pt").mkdir()
    assert prepare_training(params, DRAFT)[0].step == 4


def test_checkpoints_that_a_killed_run_was_removing_are_gone_with_the_next(params):
    train(params, until=5)
    (gone := DRAFT / ".checkpoints.gone").mkdir()
    (gone / "step-00000008.pt").write_bytes(b"x")
    assert prepare_training(params, DRAFT)[0].step == 4
    assert not gone.exists()
