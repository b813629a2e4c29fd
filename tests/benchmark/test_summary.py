"""The report of a benchmark, from planted passes."""

import re
from pathlib import Path

import pytest

from tasks.benchmark.arms import Arm
from tasks.benchmark.measure import Measured
from tasks.benchmark.partial import Partial
from tasks.benchmark.rows import cell_rows, prompt_rows
from tasks.benchmark.summary import compared, headline_comparison, summarise
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.measured_draft import params_sha256
from tasks.common.params import Params
from tasks.common.server_plan import ServerPlan
from tests.benchmark.passes import completion, load, made

PLAIN, DRAFTED = completion(10, 2.0), completion(10, 1.0, (2, 0, 0, 2), pieces=((0.1, 1), (1.0, 10)))


def arm(name, draft=None) -> Arm:
    kind = "speculative" if draft else "baseline"
    return Arm(name, ServerPlan(kind, 1, 1, "cpu", "float32", Path("t"), draft, None, (), ()))


ARMS = [arm("baseline"), arm("speculative", Path("ours")), arm("theirs", Path("their"))]


def report(passes, side_by_side=True, device="cpu", **settings):
    names = {one.arm for one in passes}
    measured = Measured(tuple(passes), {name: {"tp_size": 1, "port": 3} for name in names}, side_by_side)
    arms = [one for one in ARMS if one.name in names]
    predicted = None if "sets" in settings else 2.0
    params = Params.model_validate({"target": {"device": device}, "benchmark": settings})
    return summarise(measured, arms, params, predicted, {"machine": "2 cores"})


def both(of, plain=PLAIN, drafted=DRAFTED, drafts=("speculative",)):
    count = len(of.questions)
    return [
        one
        for repeat in range(3)
        for one in [
            made("baseline", of, [plain] * count, repeat),
            *(made(draft, of, [drafted] * count, repeat) for draft in drafts),
        ]
    ]


def three_passes(of, plain, drafted):
    arms = (("baseline", plain), ("speculative", drafted))
    return [made(name, of, answers, repeat) for repeat in range(3) for name, answers in arms]


def test_acceptance_comes_with_survival_prediction_and_settings():
    found = report(both(load(2)))
    assert found["speculative"]["accept_length"] == 2.5
    assert found["speculative"]["verify_rounds"] == 24
    assert found["survival"] == found["speculative"]["survival"] == [0.5, 0.5, 0.5]
    assert found["served_over_predicted"] == 1.25
    assert (found["speedup"], found["speedup_interval"]) == (2.0, [2.0, 2.0])
    assert found["baseline"]["tokens_per_s"] == 5
    assert found["settings"]["draft_tokens"] == 4
    assert found["settings"]["conditions"] == {"tp_size": 1}
    assert found["lossless"] and found["agreement"] == {"answers": 1.0, "tokens": 1.0}


def test_the_headline_is_our_draft_at_the_lowest_concurrency():
    slow = completion(10, 4.0, (2, 0, 0, 2))
    passes = both(load(2)) + both(load(2, concurrency=4), drafted=slow)
    passes += [made("theirs", load(2), [slow] * 2, repeat) for repeat in range(3)]
    found = report(passes, concurrency=(1, 4))
    assert found["speedup"] == 2.0
    rows = [(row["draft"], row["concurrency"], row["speedup"]) for row in found["cells"]]
    assert rows == [("speculative", 1, 2.0), ("speculative", 4, 0.5), ("theirs", 1, 0.5)]


def test_above_one_request_at_a_time_both_servers_speeds_are_those_of_all_users():
    of = load(4, concurrency=2)
    passes = [
        made(arm, of, [answer] * 4, repeat, seconds=seconds)
        for repeat in range(3)
        for arm, answer, seconds in (("baseline", PLAIN, 4.0), ("speculative", DRAFTED, 2.0))
    ]
    found = report(passes, concurrency=(2,))
    assert (found["speculative"]["tokens_per_s"], found["baseline"]["tokens_per_s"], found["speedup"]) == (20, 10, 2)


def test_advice_is_given_for_each_concurrency_and_says_nothing_twice():
    first, second, of_both = report(both(load(2)) + both(load(2, concurrency=4)), concurrency=(1, 4))["advice"]
    assert first.startswith("1 request at a time: You need 1.25, you have 2.50: the draft pays, decoding is 2.00 times")
    assert second.startswith("4 requests at once: You need")
    assert "was not measured" not in first + second
    assert of_both.startswith("1 and 4 requests at once: Whether fewer draft steps would pay more is not known")


def test_of_servers_that_did_not_run_side_by_side_the_report_says_what_no_interval_shows():
    advice = report(both(load(1)), side_by_side=False)["advice"]
    assert advice[:-1] == report(both(load(1)))["advice"]
    assert advice[-1].startswith("The servers ran one after the other") and "no interval shows" in advice[-1]


def test_what_holds_of_one_concurrency_among_several_stands_behind_its_verdict():
    slow = completion(10, 3.0, (2, 0, 0, 2))
    passes = both(load(2)) + both(load(2, concurrency=4), drafted=slow)
    pays, does_not, of_both = report(passes, concurrency=(1, 4))["advice"]
    assert pays.startswith("1 request at a time: You need 1.25") and "scaling" not in pays
    assert does_not.startswith("4 requests at once: You need 3.75") and "reports/scaling.json" in does_not
    assert of_both.startswith("1 and 4 requests at once: ") and "scaling" not in of_both


def test_advice_says_what_the_speed_up_counts_beside_decoding():
    slow_prefill = completion(10, 1.5, (2, 0, 0, 2), pieces=((0.6, 1), (1.5, 10)))
    plain = completion(10, 2.4, pieces=((0.6, 1), (2.4, 10)))
    found = report(both(load(1), plain, slow_prefill), concurrency=(1,))
    assert found["speedup"] == 1.6
    assert "decoding is 2.22 times as fast. Prefill included it is 1.60 times." in found["advice"][0]


@pytest.mark.parametrize(("times", "is_sure"), [((1.0, 1.0, 1.0), True), ((1.0, 1.9, 3.0), False)])
def test_advice_calls_no_speed_up_one_that_the_passes_do_not_tell_from_1(times, is_sure):
    passes = [
        made(arm, load(1), [answer], repeat)
        for repeat, seconds in enumerate(times)
        for arm, answer in (("baseline", PLAIN), ("speculative", completion(10, seconds, (2, 0, 0, 2))))
    ]
    found = report(passes, concurrency=(1,))
    low, high = found["speedup_interval"]
    assert (low > 1) == is_sure
    unsure = f" (95 %: {low:.2f} to {high:.2f}), which is not told apart from 1."
    assert (unsure in found["advice"][0]) != is_sure
    assert ("the draft pays" in found["advice"][0]) == is_sure


def test_the_speed_up_is_the_ratio_of_the_speeds_beside_it_also_where_a_repeat_was_slow():
    of = load(1)
    passes = [
        made(arm, of, [completion(10, seconds, (2, 0, 0, 2) if arm == "speculative" else ())], repeat)
        for arm, times in (("baseline", (2.0, 2.0, 2.0)), ("speculative", (1.0, 1.0, 4.0)))
        for repeat, seconds in enumerate(times)
    ]
    found = report(passes)
    drafted, plain = (found["cells"][0][name] for name in ("tokens_per_s", "baseline_tokens_per_s"))
    assert (drafted["pooled"], drafted["median"]) == (5.0, 10.0)
    assert found["speculative"]["tokens_per_s"] == drafted["pooled"]
    assert found["speedup"] == found["cells"][0]["speedup"] == drafted["pooled"] / plain["pooled"] == 1.0


def test_a_report_says_when_and_on_what_it_was_measured_and_how_many_prompts_were_asked_for():
    settings = report(both(load(2)), num_prompts=5)["settings"]
    assert (settings["num_prompts"], settings["prompts"]) == (5, 2)
    assert settings["machine"] == "2 cores"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", settings["measured"])


def test_a_driver_that_fails_once_all_is_measured_costs_no_report(tmp_path, monkeypatch):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nexit 9\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert report(both(load(1)), device="cuda")["settings"]["machine"] == "2 cores"


def test_a_report_says_what_was_asked_for_in_params_yaml():
    settings = report(both(load(2)), num_prompts=5)["settings"]
    assert settings["params_sha256"] == params_sha256(Params.model_validate({"benchmark": {"num_prompts": 5}}))


def test_other_sets_than_the_held_out_prompts_were_not_predicted():
    found = report(both(load(1, "maths")) + both(load(1, "code")), sets={"maths": "m", "code": "c"})
    assert found["predicted_accept_length"] is found["served_over_predicted"] is None
    assert [row["set"] for row in found["cells"]] == ["maths", "code", "all"]
    assert found["settings"]["prompts"] == 1  # ids are the same in both


def test_above_temperature_zero_no_text_is_compared():
    other = completion([5] * 10, 1.0, (2, 0, 0, 2))
    found = report(both(load(1)) + both(load(1, temperature=1.0), drafted=other), temperatures=(0, 1))
    assert found["lossless"]
    assert [row["agreement"] for row in found["cells"]] == [1.0, None]


def test_a_token_that_differs_is_found():
    of = load(2)
    parted = completion([0, 1, 9, 3], 1.0, (1, 1))
    passes = three_passes(of, [completion(4, 1)] * 2, [completion(4, 1, (1, 1)), parted])
    found = report(passes)
    assert not found["lossless"]
    assert found["first_difference"] == {"prompt": "q1", "position": 2, "baseline": [2], "speculative": [9]}


def test_domains_are_reported_apart_and_leave_out_those_that_never_speculated():
    of = load(3, domains=("maths", "chat", "code"))
    drafted = [DRAFTED, completion(10, 1, (4,)), completion(10, 1)]
    passes = three_passes(of, [PLAIN] * 3, drafted)
    assert [(row["domain"], row["accept_length"]) for row in report(passes)["by_domain"]] == [
        ("chat", 1.0),
        ("maths", 2.5),
    ]


def test_acceptance_by_length_of_the_context():
    long = completion(200, 1.0, (10, 0, 0, 0))
    of = load(2)
    passes = three_passes(of, [PLAIN, completion(200, 2)], [DRAFTED, long])
    rows = report(passes)["by_context"]
    assert [(row["tokens"], row["accept_length"]) for row in rows] == [("1 to 128", 2.5), ("129 to 256", 1.0)]


def test_rows_of_the_tables_share_their_columns():
    passes = both(load(1)) + both(load(1, concurrency=2), drafted=completion(10, 1.0, (2, 0, 0, 2)))
    found = report(passes, concurrency=(1, 2))
    first, second = cell_rows(found)
    assert first.keys() == second.keys()
    assert (first["tokens_per_s_median"], first["survival_3"], first["first_token_ms_p50"]) == (10.0, 0.5, 100.0)
    rows = prompt_rows(headline_comparison(compared(passes, ARMS)).pairs)
    assert [(row["prompt"], row["repeat"], row["accept_length"]) for row in rows] == [("q0", r, 2.5) for r in range(3)]


def test_the_row_of_an_answer_has_both_servers_lengths():
    passes = both(load(1), drafted=completion(2, 1.0, (0, 1)))
    row = prompt_rows(headline_comparison(compared(passes, ARMS)).pairs)[0]
    assert (row["answer_tokens"], row["baseline_tokens"], row["first_difference"]) == (2, 10, 2)


def test_what_was_measured_before_a_crash_is_kept_and_marked(tmp_path):
    path = tmp_path / "partial.json"
    with pytest.raises(RuntimeError), Partial(Params(), path) as partial:
        partial.keep(both(load(1))[:2])
        assert "killed" in read_json(path)["why"]
        partial.keep(both(load(1, concurrency=2))[:1])
        raise RuntimeError("the baseline server died")
    kept = read_json(path)
    assert (kept["complete"], kept["why"], kept["repeats"]) == (False, "the baseline server died", 3)
    rows = [(row["arm"], row["concurrency"], row["tokens_per_s"], row["correct_drafts"]) for row in kept["passes"]]
    assert rows == [("baseline", 1, 5.0, 0), ("speculative", 1, 10.0, 6), ("baseline", 2, 5.0, 0)]


def test_what_was_kept_stays_where_nothing_can_be_written_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "partial.json"
    with pytest.raises(RuntimeError) as error, Partial(Params(), path) as partial:
        partial.keep(both(load(1))[:2])
        monkeypatch.setattr(partial, "_path", path / "within a file")
        raise RuntimeError("the baseline server died")
    assert "What was measured is kept" in error.value.__notes__[0]
    assert len(read_json(path)["passes"]) == 2


def test_an_earlier_report_counts_until_the_servers_are_up_and_no_longer(tmp_path):
    path, report = tmp_path / "partial.json", tmp_path / "benchmark.json"
    for each in (path, report):
        each.write_text("{}")
    with pytest.raises(RuntimeError), Partial(Params(), path, [report]):
        raise RuntimeError("the port is in use")
    assert path.exists() and report.exists()
    with pytest.raises(RuntimeError), Partial(Params(), path, [report]) as partial:
        partial.begin()
        raise RuntimeError("the baseline server died")
    assert not path.exists() and not report.exists()


@pytest.mark.parametrize("name", ["partial.json", "benchmark.json"])
def test_an_earlier_report_that_cannot_be_removed_is_a_sentence(tmp_path, name):
    (tmp_path / name).mkdir()
    partial = Partial(Params(), tmp_path / "partial.json", [tmp_path / "benchmark.json"])
    with pytest.raises(DraftlineError, match=rf"{name}: cannot be removed: Is a directory\.$"):
        partial.begin()


@pytest.mark.parametrize(("ended", "why"), [(SystemExit(143), "SIGTERM."), (KeyboardInterrupt(), "SIGINT.")])
def test_a_benchmark_that_was_told_to_end_says_so_and_where_it_left_what_it_measured(tmp_path, ended, why):
    path = tmp_path / "partial.json"
    with pytest.raises(type(ended)) as raised, Partial(Params(), path) as partial:
        partial.keep(both(load(1))[:2])
        raise ended
    assert read_json(path)["why"] == why
    assert raised.value.__notes__ == [f"What was measured is kept in {path}, marked as incomplete."]


@pytest.mark.parametrize("name", ["tuned.json", "profile.json", "scaling.json"])
def test_a_damaged_file_that_feeds_the_advice_alone_costs_a_sentence_of_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / name).write_text('{"tokens": 3')
    slow = completion(10, 2.4, (2, 0, 0, 2))
    advice = report(both(load(1), drafted=slow))["advice"]
    assert len(advice) == 1 and f"reports/{name}" in advice[0] and "Make it again, or remove it." in advice[0]


@pytest.mark.parametrize("name", ["machine", "draft_sha256", "steps", "version", "extra_args"])
def test_the_advice_takes_a_steps_time_from_a_profile_of_the_same_draft_on_the_same_machine(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    passes = both(load(1))
    settings = report(passes)["settings"] | {name: "another"}
    parts = {"draft_passes": 2, "parts": [{"part": "draft", "host_share": 0.3}]}
    for profiled, is_known in ((settings, False), (report(passes)["settings"], True)):
        profile = {"settings": profiled, "by_requests": [{"requests": 1, "round": parts}]}
        write_json(Path("reports/profile.json"), profile)
        assert ("was not measured" not in " ".join(report(passes)["advice"])) is is_known
