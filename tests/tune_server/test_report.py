"""What stands in the reports of a search, and that the profile is a section that params.yaml takes."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tasks.common.advice_reports import measured_step_share
from tasks.common.machine import machine
from tasks.common.params import Params
from tasks.tune_server.candidates import Candidate, Option, Shape
from tasks.tune_server.options import Device
from tasks.tune_server.report import report, verdict, write_profile
from tasks.tune_server.search import Search
from tasks.tune_server.show import show
from tasks.tune_server.space import Space
from tests.tune_server.bench import Bench, round_s

PARAMS = Params.model_validate(
    {
        "train_draft": {"ttt_length": 7},
        "serve": {
            "max_running_requests": 1,
            "num_steps": 4,
            "num_draft_tokens": 5,
            "extra_args": ["--stream-interval", "2"],
        },
        "benchmark": {"concurrency": [1]},
    }
)

IDENTITY = {"target_sha256": "1" * 64, "draft_sha256": "2" * 64, "machine": machine("cpu")}
WITH = IDENTITY | {
    "device": "cpu",
    "dtype": "float32",
    "version": version("sglang"),
    "extra_args": ["--stream-interval", "2"],
}


def search(params: Params = PARAMS, gpu: Device = Device(None), **bench) -> Search:  # noqa: B008
    found = Search(Space.of(params, 1, "LlamaForCausalLM", gpu), Bench(3000, **bench))
    found.run()
    return found


def reported(found: Search) -> dict:
    return json.loads(json.dumps(report(found, PARAMS, IDENTITY, 1, 3000.0, 1234.56, Path("reports"))))


def test_the_best_stands_beside_the_automatic_choice_the_usual_numbers_and_the_current_ones():
    found = reported(search(ratio=0.5))
    rows = {row["row"]: row for row in found["comparison"]}
    assert list(rows) == ["best", "automatic", "5/4/8", "3/1/4", "current"]
    assert rows["automatic"]["name"] == rows["5/4/8"]["name"] == "5/4/8 (automatic)"
    assert rows["current"]["name"] == "4/1/5"
    assert rows["best"]["result"]["speedup"]["median"] >= max(r["result"]["speedup"]["median"] for r in rows.values())


def test_every_candidate_is_there_with_its_rungs_or_the_reason_why_not():
    found = reported(search(ratio=0.3, broken=lambda c: c.shape is not None and c.shape.topk == 2))
    assert {bool(row["rungs"]) + bool(row["failed"]) + bool(row["pruned"]) for row in found["candidates"]} == {1}
    for row in found["candidates"]:
        assert row["extra_args"][:2] == ["--stream-interval", "2"]
        for rung in row["rungs"]:
            assert rung["speedup"]["min"] <= rung["speedup"]["median"] <= rung["speedup"]["max"]
            assert rung["speedup"]["repeats"] == 3


def test_the_table_is_in_the_order_of_the_choice(capsys):
    found = search(ratio=0.3)
    slower = next(trial for trial in found.trials.values() if found.best.is_above(trial))
    slower.results.append(replace(found.best.last, rung=9, ratios=(9.0,)))  # the budget cut it
    show(reported(found))
    table = capsys.readouterr().out.partition("rung 9")[2]
    assert table.split()[0] == found.best.candidate.name


def test_the_time_of_a_round_by_steps_is_what_the_benchmarks_advice_reads(tmp_path):
    found = reported(search())
    assert found["round_time"] == pytest.approx({"fixed_ms": 1.5, "step_ms": 0.2}, abs=1e-3)
    (tmp_path / "tuned.json").write_text(json.dumps(found))
    assert measured_step_share(1, 3, 1, WITH, tmp_path) == pytest.approx(0.0002 / round_s(Shape.chain(3)), rel=1e-3)


@pytest.mark.parametrize("ratio", [0.05, 0.8])
def test_the_profile_is_a_section_that_the_parameters_take(tmp_path, ratio):
    found, path = search(ratio=ratio), tmp_path / "tuned_params.yaml"
    write_profile(path, found, PARAMS, "python -m tasks.tune_server --minutes 6", "an H200")
    text = path.read_text()
    loaded = yaml.safe_load(text)
    assert list(loaded) == ["serve"]
    taken = Params.model_validate(PARAMS.model_dump() | loaded).serve
    assert Shape.of(taken) == found.best.candidate.shape
    assert taken.extra_args == PARAMS.serve.extra_args
    for words in ("--minutes 6", "an H200", f"{found.best.last.speedup:.2f} times", "Acceptance length"):
        assert words in text.partition("serve:\n")[0]
    assert "train again" not in text


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_flags_with_which_states_are_dumped_as_well_train_again(tmp_path, engine):
    params = PARAMS.model_copy(update={"dump": PARAMS.dump.model_copy(update={"engine": engine})})
    found, path = search(params, Device((9, 0)), effect={"triton": 1.3}), tmp_path / "tuned_params.yaml"
    write_profile(path, found, params, "", "")
    assert ("`dvc repro` would dump and train again" in path.read_text()) == (engine == "sglang")


def test_settings_of_the_best_are_in_the_profile(tmp_path):
    found, path = search(gpu=Device((9, 0)), effect={"triton": 1.3}), tmp_path / "tuned_params.yaml"
    write_profile(path, found, PARAMS, "", "")
    assert yaml.safe_load(path.read_text())["serve"]["extra_args"] == [
        "--stream-interval", "2", "--attention-backend", "triton",
    ]  # fmt: skip


def test_what_settings_do_for_the_plain_server_too_is_not_the_drafts():
    assert "Its settings make the plain server 1.30 times as fast as well" in verdict(
        search(gpu=Device((9, 0)), effect={"triton": 1.3})
    )


def test_the_drafts_own_share_is_of_a_rung_that_both_were_in_and_else_not_said():
    found = search(gpu=Device((9, 0)), effect={"triton": 1.3})
    best = found.best
    alike, common = found.trials[Candidate(None, best.candidate.options)], best.results[0]
    assert best.last.rung > common.rung
    later = replace(alike.last, rung=99)
    alike.results[:] = [replace(later, rung=common.rung, ratios=(1.1, 1.2, 1.3)), later]
    assert (
        f"the plain server 1.20 times as fast as well in rung {common.rung}, where the best was {common.speedup:.2f}: of the draft "
        f"itself are {common.speedup / 1.2:.2f} times."
    ) in verdict(found)
    alike.results[:] = [later]
    assert "Its settings" not in verdict(found)


@pytest.mark.parametrize(("lowest", "said"), [(0.5, ", within the spread"), (0.999, "")])
def test_a_best_that_its_spread_does_not_tell_from_the_current_one_is_said_to_be_so(lowest, said):
    found = search(ratio=0.3)
    last = found.best.last
    found.best.results[-1] = replace(last, ratios=(lowest * last.speedup, last.speedup, last.speedup))
    current = found.trials[found.space.rows["current"]].last
    assert current.speedup < 0.95 * last.speedup
    assert verdict(found).endswith(f"With the current parameters it is {current.speedup:.2f} times{said}.")


def test_current_parameters_that_were_left_behind_are_compared_in_the_rung_that_both_were_in():
    found = search(ratio=0.3)
    current = found.trials[found.space.rows["current"]]
    of_first, in_first = found.best.results[0], current.results[0]
    current.results[:] = [replace(in_first, ratios=tuple(1.01 * ratio for ratio in of_first.ratios))]
    assert found.best.last.rung > 0
    now, then = current.last.speedup, of_first.speedup
    assert verdict(found).endswith(
        f"With the current parameters it is {now:.2f} times in rung 0, where the best was {then:.2f}, within the spread."
    )


def test_of_a_repeat_each_the_verdict_tells_nothing_apart():
    found = search(ratio=0.3)
    for trial in found.trials.values():
        trial.results[:] = [replace(result, ratios=result.ratios[:1]) for result in trial.results[:1]]
    assert " in 1 repeat)" in verdict(found)
    assert verdict(found).endswith("; no rung asked all repeats of both.")


def test_a_best_below_one_is_said_to_beat_nothing():
    found = search(ratio=0.05)
    assert verdict(found).startswith("No plan beats the plain server; the best is 1/1/2")
    assert "You need" in reported(found)["advice"][0]


def test_without_any_measurement_there_is_no_table_and_the_reasons_are_said(capsys):
    show(reported(search(broken=lambda c: True)))
    said = capsys.readouterr().out
    assert "dropped: refused" in said
    assert "Nothing was measured in full" in said
    assert "server  " not in said


@pytest.fixture
def short() -> Search:
    """There was time for the current parameters alone."""
    found = Search(Space.of(PARAMS, 1, "LlamaForCausalLM", Device(None)), Bench(25, 2, False, start_s=10.0))
    found.run()
    return found


def test_the_current_parameters_alone_are_the_best_of_nothing(short, capsys):
    found = reported(short)
    assert found["best"] is None
    assert found["verdict"].startswith("4/1/5, the current parameters: ")
    assert found["verdict"].endswith("Nothing else that params.yaml would take was measured.")
    rows = {row["row"]: row["result"] for row in found["comparison"]}
    assert {name for name, result in rows.items() if result is None} == {"automatic", "5/4/8", "3/1/4"}
    assert "current" in rows
    show(found)
    said = capsys.readouterr().out
    assert said.count("not measured") == 3
    assert "best" not in said


def test_a_row_for_which_there_was_no_time_is_said_in_the_verdict():
    found = Search(Space.of(PARAMS, 1, "LlamaForCausalLM", Device(None)), Bench(70, 2, False, start_s=20.0))
    found.run()
    assert found.has_compared
    assert re.search(r"minutes are too short to measure 3/1/4.* --minutes \d+ would do\.$", verdict(found))


def test_the_advice_of_a_search_without_two_chains_reads_the_profile_and_else_sends_to_it(short, tmp_path):
    def advised() -> str:
        return report(short, PARAMS, IDENTITY, 1, 25.0, 25.0, tmp_path)["advice"][1]

    assert "python -m tasks.profile_server" in advised()
    assert "tune_server" not in advised()
    parts = {"draft_passes": 4, "parts": [{"part": "draft", "host_share": 0.4}]}
    settings = WITH | {"steps": 4, "topk": 1}
    profile = {"settings": settings, "by_requests": [{"requests": 1, "round": parts}]}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert "instead of 4 would need" in advised()
    flags = ("--attention-backend", "triton")
    bare = short.trials.pop(short.best.candidate)
    other = replace(bare.candidate, options=(Option("triton", "attention", flags),))
    short.trials[other] = replace(bare, candidate=other)
    assert "python -m tasks.profile_server" in advised()  # of another attention, another time
    settings["extra_args"] = [*settings["extra_args"], *flags]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert "instead of 4 would need" in advised()


def test_servers_that_one_reason_rules_out_are_named_together(capsys):
    found = search(ratio=0.3)
    show(reported(found))
    lines = [line for line in capsys.readouterr().out.splitlines() if "not started: at best" in line]
    pruned = [trial.candidate for trial in found.trials.values() if trial.pruned]
    assert Candidate(Shape.chain(6)) in pruned
    assert 0 < len(lines) < len(pruned)
