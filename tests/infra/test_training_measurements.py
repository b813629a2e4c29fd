"""The measurement of training in its smallest size, on a CPU: all that it prints was computed, on the same states."""

import sys

import pytest

from infra.gpu import measure_training
from tasks.common.files import read_json


def measured(monkeypatch, tmp_path, *more: str) -> dict:
    where = ("--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json"))
    monkeypatch.setattr(sys, "argv", ["measure_training", "--size", "tiny", "--device", "cpu", *where, *more])
    measure_training.main()
    return read_json(tmp_path / "out.json")


@pytest.mark.faults
def test_a_measurement_runs_through_and_its_losses_are_those_of_a_second_one(monkeypatch, tmp_path, capsys):
    first = measured(monkeypatch, tmp_path, "--steps", "12", "--discard", "2")
    printed = capsys.readouterr().out
    second = measured(monkeypatch, tmp_path, "--steps", "12", "--discard", "2")
    ours, limits = first["draftline"], first["floor"]
    assert len(ours["losses"]) == 12 and ours["losses"] == second["draftline"]["losses"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert limits["floor_ms"] == pytest.approx(sum(limits["parts_ms"].values()), abs=0.01)
    assert ours["time_over_floor"] == pytest.approx(ours["ms_per_step"] / limits["floor_ms"], abs=0.01)
    assert ours["tokens_per_s"] == pytest.approx(1e3 * 128 / ours["ms_per_step"], rel=0.01)
    assert f"floor {limits['floor_ms']} ms a step" in printed and "draftline" in printed


def test_steps_that_all_are_discarded_are_refused_at_once(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measured(monkeypatch, tmp_path, "--steps", "40")
    assert "--steps 40 leaves none to count: --discard is 50" in capsys.readouterr().err
