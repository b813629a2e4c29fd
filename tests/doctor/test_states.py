"""Faults that only a dump can show: the norm of the last state, the map's coverage, another run's states."""

import pytest
import torch
from safetensors.torch import save_file

from tasks.common.hidden_states import Sample
from tests.doctor.checkpoints import HIDDEN, contract_of, not_fine, sglang_draft
from tests.stored import write_split


@pytest.fixture
def dump(tmp_path, write_target):
    """`dump(tokens=..., last=..., **contract)`: a dump of one sample beside a target that has a final norm."""

    def write(tokens=None, last=None, **changes):
        weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
        target = write_target()
        save_file({"model.norm.weight": weight}, target / "model.safetensors")
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


def test_states_of_another_run_than_the_drafts_are_named(examined, dump):
    check = examined(sglang_draft(), hidden_states=dump(tokenizer_sha256="9" * 64))["H7 record"]
    assert check.verdict == "error"
    assert "tokenizer_sha256" in check.found
