"""What a run says at its end stands in its benchmark's report."""

import pytest

from flows.summary import PipelineResult, StageResult, print_summary
from tasks.common.files import write_json
from tasks.common.params import Params
from tests.benchmark.planted_report import planted_report


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def end(report: dict) -> str:
        write_json(tmp_path / "reports" / "benchmark.json", report)
        print_summary(PipelineResult("a-run", [StageResult("benchmark", "Completed", 1.0)]), Params())
        return capsys.readouterr().out

    return end


def test_the_speeds_at_the_fewest_and_the_most_requests_at_once_are_named(said):
    report = planted_report(concurrency=(1, 4, 16))
    first, _, last = (cell for cell in report["cells"] if cell["set"] == "all" and cell["temperature"] == 0)
    lines = said(report).splitlines()
    for cell, at_once in ((first, "1 request at a time"), (last, "16 requests at once")):
        low, high = cell["speedup_interval"]
        speed = f"{cell['speedup']:.2f} times the plain server (95 %: {low:.2f} to {high:.2f})"
        [place] = [number for number, line in enumerate(lines) if speed in line]
        assert f"tokens/s, {at_once}" in lines[place + 1]
    assert "tokens/s, 4 requests at once" not in "".join(lines)
    assert "reports/benchmark.html" in "".join(lines)


@pytest.mark.parametrize("predicted", [2.16, None])
def test_a_prediction_is_shown_where_there_is_one(said, predicted):
    assert ("2.16 predicted" in said(planted_report() | {"predicted_accept_length": predicted})) == (
        predicted is not None
    )


def test_after_training_alone_it_is_predicted_for_the_steps_that_will_be_served(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "reports" / "train_draft.json", {"predicted_accept_lengths": [1.5, 2.25, 2.75]})
    params = Params.model_validate({"serve": {"num_steps": 2, "num_draft_tokens": 3}})
    print_summary(PipelineResult("a-run", [StageResult("train_draft", "Completed", 1.0)]), params)
    assert "2.25 predicted" in capsys.readouterr().out
