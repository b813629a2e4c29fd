"""Faults that only a dump can show: the norm of the last state, the map's coverage, another run's states."""

import pytest
import torch
from safetensors.torch import save_file

from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.hidden_states import Sample
from tasks.doctor.states import check_map_source, check_target_weights, open_states
from tasks.train_draft.vocab_map import build_vocab_map, count_supervised_tokens
from tests.doctor.checkpoints import DRAFT_VOCAB, HIDDEN, VOCAB, contract_of, not_fine, sglang_draft
from tests.stored import write_split

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TARGET = {EMBEDDING: torch.ones(VOCAB, HIDDEN), NORM: torch.ones(HIDDEN), HEAD: torch.ones(VOCAB, HIDDEN)}


@pytest.fixture
def dump(tmp_path, write_target):
    """`dump(tokens=..., last=..., **contract)`: a dump of one sample beside a target that has a final norm."""

    def write(tokens=None, last=None, **changes):
        weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
        target = write_target()
        save_file(TARGET | {NORM: weight}, target / "model.safetensors")
        ids = torch.arange(24) * 3 + 1 if tokens is None else tokens
        states = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(2))
        normed = states / states.square().mean(-1, keepdim=True).sqrt() * weight
        sample = Sample(
            id="s",
            input_ids=ids.int(),
            loss_mask=torch.ones(len(ids), dtype=torch.uint8),
            aux=torch.randn(len(ids), 3, HIDDEN),
            last=normed if last is None else last(states, normed, weight),
        )
        folder = tmp_path / "states" / "train"
        write_split(folder, contract_of("llama").model_copy(update=changes), [[sample]])
        return folder.parent

    return write


def test_states_of_the_same_run_pass(examined, dump):
    checks = examined(sglang_draft(), hidden_states=dump())
    assert not_fine(checks) == {}
    assert checks["C5 final norm"].verdict == checks["V6 coverage"].verdict == "ok"


def test_the_layers_of_the_manifest_are_the_ones_that_count(examined, dump):
    draft = sglang_draft()
    draft.record = False
    check = examined(draft, hidden_states=dump(aux_layer_ids=(2, 5, 8)))["C3 layers"]
    assert "it was trained on [2, 5, 8]" in check.found


@pytest.mark.parametrize(
    ("last", "is_normed"),
    [
        (lambda states, normed, weight: states, True),
        (lambda states, normed, weight: normed * weight, True),
        (lambda states, normed, weight: normed, False),
    ],
    ids=["never", "twice", "once though the manifest says never"],
)
def test_a_final_norm_that_is_not_applied_once_is_named(examined, dump, last, is_normed):
    draft = sglang_draft()
    draft.record = False
    check = examined(draft, hidden_states=dump(last=last, last_is_normed=is_normed))["C5 final norm"]
    assert check.verdict == "error"


def test_a_map_of_another_corpus_covers_too_little(examined, dump):
    check = examined(sglang_draft(), hidden_states=dump(tokens=torch.arange(24) * 3 + 2))["V6 coverage"]
    assert check.verdict == "error"
    assert "covers 0.0%" in check.found


# --- V4, V5: the map that the head was trained for


def recorded(folder, states) -> Subject:
    """The draft in the folder, whose record holds the hash of the map that these states give."""
    subject = Subject(Draft.of(DraftFiles.open(folder)))
    built = build_vocab_map(count_supervised_tokens(states), len(subject.draft.array("d2t")))
    write_json(folder / "draftline.json", {"vocab_map_sha256": built.inputs_sha256})
    return subject


def test_the_map_of_these_states_passes(tmp_path, dump):
    states = open_states(dump())
    check = check_map_source(recorded(sglang_draft().write(tmp_path / "draft"), states), states)
    assert (check.verdict, "24 rows" in check.found) == ("ok", True)


def test_a_map_of_other_states_is_named_though_its_offsets_are_right(tmp_path, dump):
    folder = sglang_draft().write(tmp_path / "draft")
    subject = recorded(folder, open_states(dump()))
    write_json(folder / "draftline.json", {"vocab_map_sha256": "f" * 64})
    check = check_map_source(subject, open_states(tmp_path / "states"))
    assert check.verdict == "error"
    assert "draftline.json says ffffffffffff, these states give" in check.found


def test_a_map_that_was_rebuilt_after_the_head_was_trained_is_named(tmp_path, dump):
    """V4: the record is the old map's, and so is the head; the rows mean other tokens."""
    states = open_states(dump())
    draft = sglang_draft()
    ids = torch.arange(DRAFT_VOCAB) * 3 + 2
    draft.tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    draft.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    check = check_map_source(recorded(draft.write(tmp_path / "draft"), states), states)
    assert check.verdict == "error"
    assert check.found == "24 of 24 rows mean other tokens than when the head was trained."


def test_a_draft_without_a_record_of_its_map_is_not_judged_by_it(tmp_path, dump):
    subject = Subject(Draft.of(DraftFiles.open(sglang_draft().write(tmp_path / "draft"))))
    assert check_map_source(subject, open_states(dump())).verdict == "not applicable"


# --- W9: what the trainer reads off the target


def in_one_file(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def in_shards(folder, tensors):
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


@pytest.mark.parametrize("store", [in_one_file, in_shards])
@pytest.mark.parametrize("tied", [True, False])
def test_a_target_in_one_file_or_in_shards_tied_or_not_is_read(write_target, store, tied):
    folder = write_target(tie_word_embeddings=tied)
    store(folder, {name: tensor for name, tensor in TARGET.items() if not (tied and name == HEAD)})
    check = check_target_weights(folder)
    assert check.verdict == "ok"
    assert check.found == "embedding [96, 32], " + ("tied to the embedding" if tied else "head [96, 32]")


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({NORM: TARGET[NORM], HEAD: TARGET[HEAD]}, "no tensor model.embed_tokens.weight"),
        ({EMBEDDING: TARGET[EMBEDDING], HEAD: TARGET[HEAD]}, "no tensor model.norm.weight"),
        ({EMBEDDING: TARGET[EMBEDDING], NORM: TARGET[NORM]}, "tie_word_embeddings is false"),
        (TARGET | {HEAD: torch.ones(VOCAB, 8)}, "the head is [96, 8]"),
        (TARGET | {EMBEDDING: torch.ones(8, HIDDEN)}, "the embedding is [8, 32]"),
        (TARGET | {NORM: torch.ones(8)}, "the final norm is [8]"),
    ],
)
def test_what_the_trainer_would_not_find_in_the_target_is_named(write_target, tensors, found):
    folder = write_target()
    in_one_file(folder, tensors)
    check = check_target_weights(folder)
    assert check.verdict == "error"
    assert found in check.found


def test_a_target_that_is_cut_short_is_one_sentence(write_target):
    folder = write_target()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    assert check_target_weights(folder).verdict == "error"


def test_a_config_without_weights_is_not_judged(write_target):
    assert check_target_weights(write_target()).verdict == "not applicable"
    assert check_target_weights(None).verdict == "not applicable"


def test_states_of_another_run_than_the_drafts_are_named(examined, dump):
    check = examined(sglang_draft(), hidden_states=dump(tokenizer_sha256="9" * 64))["H7 record"]
    assert check.verdict == "error"
    assert "tokenizer_sha256" in check.found


@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_a_shard_that_cannot_be_read_is_named_by_whatever_reads_it(dump, damage):
    states = open_states(dump())
    shard = states.folder / "shard-00000.safetensors"
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    for read in (lambda: states.read_tokens(0), lambda: states.read(0)):
        with pytest.raises(DraftlineError, match=r"shard-00000\.safetensors: cannot be read \(sample s\)"):
            read()
