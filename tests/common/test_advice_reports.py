"""What advice takes from the reports of tuner and profiler, and that a damaged one costs a sentence."""

import json

import pytest

from tasks.common.advice_reports import measured_step_share, scaling_fit

GPU = {
    "target_sha256": "1",
    "draft_sha256": "2",
    "device": "cuda",
    "dtype": "bfloat16",
    "machine": "NVIDIA H200, 16 cores",
    "version": "0.5.16",
    "extra_args": ["--attention-backend", "fa3"],
}


def profiled(parts: list[dict], passes: int) -> dict:
    rounds = {"parts": parts, "draft_passes": passes}
    return {"settings": {"steps": 3, "topk": 1} | GPU, "by_requests": [{"requests": 4, "round": rounds}]}


def test_the_share_of_a_step_is_the_tuners_where_it_measured_this_number_of_requests(tmp_path):
    (tmp_path / "tuned.json").write_text(
        json.dumps({"concurrency": 4, "round_time": {"fixed_ms": 2.5, "step_ms": 0.5}, "settings": GPU})
    )
    (tmp_path / "profile.json").write_text(json.dumps(profiled([{"part": "draft", "host_share": 0.5}], 2)))
    assert measured_step_share(4, 3, 1, GPU, tmp_path) == pytest.approx(0.125)
    assert measured_step_share(1, 3, 1, GPU, tmp_path) is None
    assert measured_step_share(4, 3, 4, GPU, tmp_path) is None  # of a tree the line through chains says nothing


def test_else_it_is_what_the_profile_says_of_the_drafts_own_passes(tmp_path):
    parts = [{"part": "draft", "host_share": 0.1, "gpu_share": 0.16}, {"part": "target verify", "host_share": 0.5}]
    (tmp_path / "profile.json").write_text(json.dumps(profiled(parts, 2)))
    assert measured_step_share(4, 3, 1, GPU, tmp_path) == pytest.approx(0.08)
    assert measured_step_share(4, 5, 1, GPU, tmp_path) is None
    assert measured_step_share(4, 3, 4, GPU, tmp_path) is None


@pytest.mark.parametrize("other", GPU)
@pytest.mark.parametrize("name", ["tuned.json", "profile.json"])
def test_the_step_of_another_model_or_machine_is_not_the_one_that_is_advised_on(tmp_path, name, other):
    line = {"concurrency": 4, "round_time": {"fixed_ms": 2.5, "step_ms": 0.5}, "settings": GPU}
    reports = {"tuned.json": line, "profile.json": profiled([{"part": "draft", "host_share": 0.5}], 2)}
    (tmp_path / name).write_text(json.dumps(reports[name]))
    assert measured_step_share(4, 3, 1, GPU, tmp_path) is not None
    assert measured_step_share(4, 3, 1, GPU | {other: "another"}, tmp_path) is None


def test_a_round_of_one_step_has_no_pass_of_its_own_to_measure(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(profiled([], 0)))
    assert measured_step_share(4, 3, 1, GPU, tmp_path) is None


def test_without_reports_it_is_not_known(tmp_path):
    assert measured_step_share(1, 3, 1, GPU, tmp_path) is None


TUNED = {"concurrency": 4, "round_time": {"fixed_ms": 2.5, "step_ms": 0.5}, "settings": GPU}
PROFILED = profiled([{"part": "draft", "host_share": 0.5}], 2)


def changed(report: dict, place: str, value: object) -> str:
    """The report as JSON with another value at 'a.0.b'."""
    whole = one = json.loads(json.dumps(report))
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in path:
        one = one[key]
    one[last] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("tuned.json", json.dumps(TUNED)[:40], "not valid JSON"),
        ("tuned.json", "", "not valid JSON"),
        ("tuned.json", "[" * 100_000, "not valid JSON"),
        *(("tuned.json", text, "a JSON object is expected") for text in ("null", "[]", "3")),
        *(("tuned.json", changed(TUNED, "settings", value), "settings: ") for value in (None, [])),
        *(("tuned.json", changed(TUNED, "round_time", value), "round_time: ") for value in ("2.5", [2.5, 0.5])),
        *(
            ("tuned.json", changed(TUNED, "round_time.fixed_ms", value), "round_time.fixed_ms: ")
            for value in (None, "2.5", -1.0, float("nan"), float("inf"))
        ),
        ("tuned.json", changed(TUNED, "round_time", {"fixed_ms": 0.0, "step_ms": 0.0}), "more than no time"),
        ("profile.json", "[]", "a JSON object is expected"),
        *(("profile.json", changed(PROFILED, "by_requests", value), "by_requests") for value in (None, [1])),
        ("profile.json", changed(PROFILED, "by_requests", [{"requests": 4}]), "by_requests.0.round: is missing"),
        ("profile.json", changed(PROFILED, "by_requests.0.round.draft_passes", -1), "draft_passes: "),
        ("profile.json", changed(PROFILED, "by_requests.0.round.parts.0.host_share", "0.5"), "parts.0.host_share: "),
    ],
)
def test_a_damaged_report_is_named_with_its_field_and_is_as_one_that_is_not_there(tmp_path, name, text, field):
    (tmp_path / name).write_text(text)
    said = measured_step_share(4, 3, 1, GPU, tmp_path)
    assert said.startswith(f"{tmp_path / name}: ") and field in said and said.endswith("Make it again, or remove it.")
    other, report, share = {
        "tuned.json": ("profile.json", PROFILED, 0.25),
        "profile.json": ("tuned.json", TUNED, 0.125),
    }[name]
    (tmp_path / other).write_text(json.dumps(report))
    assert measured_step_share(4, 3, 1, GPU, tmp_path) == share


@pytest.mark.parametrize(
    "text",
    [
        changed(PROFILED, "settings", GPU),
        changed(PROFILED, "by_requests.0.round.parts", []),
        changed(PROFILED, "by_requests", []),
    ],
)
def test_a_profile_without_this_step_is_none(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    assert measured_step_share(4, 3, 1, GPU, tmp_path) is None


def test_a_scaling_fit_that_cannot_be_read_has_nothing_in_it(tmp_path):
    assert scaling_fit(tmp_path) is None
    (tmp_path / "scaling.json").write_text('{"tokens": 3')
    assert scaling_fit(tmp_path) == {}
