"""Plots, page, terminal and MLflow read the report that summarise writes, after its way through JSON."""

import json
from pathlib import Path

from tasks.benchmark.arms import Arm
from tasks.benchmark.measure import Measured
from tasks.benchmark.page import render
from tasks.benchmark.plots import plot_all
from tasks.benchmark.show import show
from tasks.benchmark.summary import summarise
from tasks.common.files import write_json
from tasks.common.headline import headline
from tasks.common.params import Params
from tasks.common.server_plan import ServerPlan
from tasks.gates.benchmark_files import REPORT, read_report
from tests.benchmark.passes import completion, load, made
from tests.benchmark.planted_report import planted_report

NAMES = ("baseline", "speculative", "theirs")


def summarised() -> dict:
    plain = completion(10, 2.0, pieces=((0.2, 1), (2.0, 10)))
    drafted = completion(10, 1.0, (2, 0, 0, 2), pieces=((0.1, 1), (1.0, 10)))
    loads = [
        load(2, name, concurrency, temperature)
        for name in ("maths", "code")
        for concurrency, temperature in ((1, 0.0), (4, 0.0), (1, 1.0))
    ]
    passes = [
        made(name, of, [plain if name == "baseline" else drafted] * 2, repeat)
        for repeat in range(3)
        for of in loads
        for name in NAMES
    ]
    arms = [
        Arm(name, ServerPlan(name, 1, 1, "cpu", "float32", Path("t"), _draft(name), None, (), ())) for name in NAMES
    ]
    asked = {"sets": {"maths": "m", "code": "c"}, "concurrency": (1, 4), "temperatures": (0, 1)}
    measured = Measured(tuple(passes), {name: {"tp_size": 1} for name in NAMES}, side_by_side=True)
    identity = {"target_sha256": "1" * 64, "draft_sha256": "2" * 64, "machine": "2 cores"}
    params = Params.model_validate({"benchmark": asked})
    return json.loads(json.dumps(summarise(measured, arms, params, None, identity)))


def _draft(name: str) -> Path | None:
    return None if name == "baseline" else Path(name)


def test_it_can_be_drawn_shown_and_logged(tmp_path, monkeypatch, capsys):
    report = summarised()
    plots = plot_all(report, tmp_path)
    assert len(plots) == 5
    assert "2.00 times as fast with this draft" in render(report, plots)
    show(report)
    assert "2.00 (2.00-2.00)" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    Path("reports").mkdir()
    Path("reports/benchmark.json").write_text(json.dumps(report))
    points = {(point.name, point.step): point.value for point in headline("benchmark", Params())}
    assert points["speedup/all", 4] == points["theirs/speedup/code", 1] == 2.0


def test_its_gate_can_read_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(REPORT, summarised())
    assert len(read_report()["cells"]) == 18


def test_the_planted_report_has_its_form():
    """What the tests beside this one plant is what they will be given."""

    def form(value):
        if isinstance(value, dict):
            return {name: form(one) for name, one in value.items()}
        return [form(value[0])] if isinstance(value, list) and value else type(value).__name__

    real, planted = summarised(), planted_report(concurrency=(1, 4), sets=("maths", "code"), drafts=("theirs",))
    for report in (real, planted):
        for varying in ("predicted_accept_length", "served_over_predicted"):
            del report[varying]
        del report["settings"]["conditions"]
    assert form(planted) == form(real)
