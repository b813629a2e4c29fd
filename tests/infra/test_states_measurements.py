"""The measurements of hidden states, as their commands are given, on sizes that take seconds."""

import json
import sys

import pytest

from infra.benchmarks import hidden_states_io
from infra.gpu import measure_hidden_states
from tasks.common.files import read_json


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`command(module, *arguments)`: its main, in a folder that it may leave."""
    monkeypatch.chdir(tmp_path)

    def run(module, *arguments) -> None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()

    return run


@pytest.fixture
def measure_io(command, tmp_path, capsys):
    """What `hidden_states_io` prints of so many samples of width 8."""

    def run(what: str, samples: int, storage_dtype: str) -> dict:
        sizes = ("--samples", samples, "--hidden-size", 8, "--storage-dtype", storage_dtype)
        command(hidden_states_io, what, "--folder", tmp_path / "io", *sizes)
        return json.loads(capsys.readouterr().out)

    return run


def test_shards_and_padded_files_hold_the_same_tokens(measure_io):
    found = measure_io("files", 12, "bfloat16")
    shards, padded = found["shards"], found["padded files"]
    assert 69 <= shards["bytes_per_token"] < 73  # 4 states of 8 values, id and mask; the shard's header
    assert padded["bytes_per_token"] > 80  # ids and mask of 8 bytes, and the padding
    assert all(rate > 0 for figures in (shards, padded) for rate in figures.values())
    assert found["ratio"].keys() == shards.keys()


def test_an_epoch_is_read_with_and_without_workers(measure_io):
    found = measure_io("scale", 400, "float32")
    assert found["batches"] * found["filled"] * 4096 == pytest.approx(found["tokens"], rel=1e-3)
    assert all(found[f"epoch_with_{workers}_workers"]["tokens_per_s"] > 0 for workers in (0, 2))


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8"])
def test_what_is_written_to_time_the_gate_passes_it(measure_io, storage_dtype):
    found = measure_io("gate", 300, storage_dtype)
    assert found["not_passed"] == []
    assert found["samples"] == 300


@pytest.mark.faults
def test_drafts_are_trained_on_both_stored_types(command, tmp_path, tiny_model_folder):
    places = ("--target", tiny_model_folder, "--work", tmp_path / "work", "--out", tmp_path / "float8.json")
    sizes = ("--train-steps", 1, "--draft-vocab-size", 310, "--max-new-tokens", 4, "--max-train", 6)
    command(measure_hidden_states, "float8", *places, *sizes, "--device", "cpu", "--dtype", "float32")
    found = read_json(tmp_path / "float8.json")
    assert found["bfloat16"]["bytes_per_token"] == 4 * 64 * 2 + 5
    assert found["float8"]["bytes_per_token"] == 4 * (64 + 4) + 5
    for seed in (0, 1, 2):
        on_bfloat16, on_float8 = (found[f"{stored}, seed {seed}"] for stored in ("bfloat16", "float8"))
        assert on_bfloat16["predicted_accept_length"] == on_bfloat16["predicted_accept_length_on_bfloat16_states"]
        assert on_bfloat16["heldout_loss"] != on_float8["heldout_loss"]
    assert all(0.99 < slot["cosine"] < 1 for slot in found["float8 / bfloat16"].values())
