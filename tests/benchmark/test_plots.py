"""The plots of a benchmark, from planted figures."""

import csv
import re

import pytest

from tasks.benchmark.plots import left_out, plot_all
from tests.benchmark.planted_report import planted_report


def rows(folder, name):
    with open(folder / f"{name}.csv") as file:
        return list(csv.DictReader(file))


def names(plots):
    return [plot.png.stem for plot in plots]


def test_every_plot_is_a_picture_with_its_numbers_beside_it(tmp_path):
    plots = plot_all(planted_report(), tmp_path)
    assert names(plots) == [
        "speedup_by_concurrency",
        "latency_against_throughput",
        "survival",
        "accept_length_by_domain",
        "throughput",
    ]
    for plot in plots:
        assert plot.png.read_bytes().startswith(b"\x89PNG")
        assert len(rows(tmp_path, plot.png.stem)) >= 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".csv"}


def test_lines_are_of_all_sets_together_and_of_greedy_answers(tmp_path):
    report = planted_report(concurrency=(1, 4), temperatures=(0.0, 1.0))
    for cell in report["cells"]:
        if cell["temperature"] == 1:
            cell["speedup"] = 9.0
    plot_all(report, tmp_path)
    pooled = [cell for cell in report["cells"] if cell["set"] == "all" and cell["temperature"] == 0]
    drawn = [(row["concurrency"], row["speedup"]) for row in rows(tmp_path, "speedup_by_concurrency")]
    assert drawn == [(str(cell["concurrency"]), str(cell["speedup"])) for cell in pooled]


def test_latency_against_throughput_has_the_plain_server_at_every_concurrency(tmp_path):
    plot_all(planted_report(concurrency=(1, 4, 16)), tmp_path)
    plain = [row for row in rows(tmp_path, "latency_against_throughput") if row["server"] == "baseline"]
    assert [(row["concurrency"], row["ms_a_token"]) for row in plain] == [
        ("1", "1.55"),
        ("4", "1.63"),
        ("16", "2.05"),
    ]


def test_of_one_concurrency_there_is_no_line_and_the_report_says_so(tmp_path):
    report = planted_report(concurrency=(4,), sets=("heldout",))
    assert names(plot_all(report, tmp_path)) == ["survival", "accept_length_by_domain", "throughput"]
    assert "only 4 requests at once was measured" in left_out(report)
    assert not left_out(planted_report(concurrency=(1, 4)))


def test_another_draft_is_in_every_comparison_by_its_name(tmp_path):
    plots = {plot.png.stem: plot for plot in plot_all(planted_report(drafts=("theirs",)), tmp_path)}
    for name in ("speedup_by_concurrency", "latency_against_throughput", "survival", "throughput"):
        assert "theirs" in plots[name].svg
        assert any("theirs" in row.values() for row in rows(tmp_path, name))


def test_no_title_runs_out_of_its_picture(tmp_path):
    from matplotlib.image import imread

    for plot in plot_all(planted_report(concurrency=(1, 64), drafts=("a-draft-with-a-long-name",)), tmp_path):
        assert (imread(plot.png)[:, -3:, :3] == 1).all(), plot.title


def test_a_tree_drafts_more_tokens_than_a_round_can_accept_and_no_title_says_that_those_are_all(tmp_path):
    report = planted_report()
    report["settings"] |= {"topk": 4, "draft_tokens": 16}
    survival = next(plot for plot in plot_all(report, tmp_path) if plot.png.stem == "survival")
    assert survival.title == "A round accepts 1.32 of at most 3 draft tokens"


def test_survival_comes_with_the_share_accepted_of_those_reached(tmp_path):
    report = planted_report()
    for cell in report["cells"]:
        cell["survival"] = [0.5, 0.2, 0.0]
    plot_all(report, tmp_path)
    assert [row["accepted_if_reached"] for row in rows(tmp_path, "survival")] == ["0.5", "0.4", "0.0"]


@pytest.mark.parametrize(("predicted", "drawn"), [(2.41, True), (None, False)])
def test_what_training_predicted_is_drawn_where_it_can_be_compared(tmp_path, predicted, drawn):
    report = planted_report() | {"predicted_accept_length": predicted}
    by_domain = next(plot for plot in plot_all(report, tmp_path) if plot.png.stem == "accept_length_by_domain")
    assert ("predicted in training" in by_domain.svg) == drawn


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    drawn = [plot_all(planted_report(), tmp_path / name) for name in ("a", "b")]
    for one, other in zip(*drawn, strict=True):
        assert (one.svg, one.png.read_bytes()) == (other.svg, other.png.read_bytes())


def test_plots_can_stand_in_one_page_together(tmp_path):
    plots = plot_all(planted_report(), tmp_path)
    ids = [found for plot in plots for found in re.findall(r'\bid="([^"]+)"', plot.svg)]
    assert len(ids) == len(set(ids))
    used = [found for plot in plots for found in re.findall(r'(?:href="|url\()#([^")]+)', plot.svg)]
    assert used
    assert set(used) <= set(ids)


def test_colours_are_the_pages_so_that_a_dark_screen_can_be_read(tmp_path):
    for plot in plot_all(planted_report(drafts=("theirs",)), tmp_path):
        assert set(re.findall("#[0-9a-f]{6}", plot.svg)) <= {"#ffffff"}


def test_a_domain_may_have_any_name(tmp_path):
    report = planted_report()
    report["by_domain"][0]["domain"] = r"cost $\frac{ in $"
    by_domain = next(plot for plot in plot_all(report, tmp_path) if plot.png.stem == "accept_length_by_domain")
    assert r"cost $\frac{ in $" in by_domain.svg
