"""Who stands before whom: by the latest rung that both were in, and by whole rungs alone."""

from collections import defaultdict

import pytest

from tasks.tune_server.candidates import Candidate, Option, Shape
from tasks.tune_server.options import Device
from tasks.tune_server.ranking import helps, ranked
from tasks.tune_server.results import Result, Trial
from tests.tune_server.bench import Noisy
from tests.tune_server.test_search import searched, space

H200 = Device((9, 0), True)
USELESS = (Option("useless", "kind"),)


def trial(steps: int, options: tuple[Option, ...] = (), **rungs: tuple[float, ...] | float) -> Trial:
    """Of a chain, with the ratios by rung (r0=, r1=, ...); of one number, three repeats that vary by a hundredth."""
    results = []
    for name, ratios in rungs.items():
        if isinstance(ratios, float):
            ratios = (ratios - 0.01, ratios, ratios + 0.01)
        results.append(Result(int(name[1:]), 4, ratios, 1.0, 1.0, 2.0, (0.5,), 0.0, 1.5, 0.001, 0.1))
    return Trial(Candidate(Shape.chain(steps), options), results)


def order(*trials: Trial) -> list[int]:
    return [one.candidate.shape.steps for one in ranked(trials, trials)]


def test_those_of_a_later_rung_stand_before_others_that_were_not_clearly_faster():
    assert order(trial(1, r0=1.5), trial(2, r0=1.49, r1=1.2), trial(3, r0=1.5, r1=1.1)) == [2, 3, 1]


def test_what_was_clearly_faster_when_both_were_asked_stands_before_though_it_was_asked_no_more():
    assert order(trial(1, r0=1.5), trial(2, r0=1.4, r1=1.4)) == [1, 2]


def test_of_several_rungs_that_both_were_in_the_latest_counts():
    assert order(trial(1, r0=1.5, r1=1.3), trial(2, r0=1.3, r1=1.4)) == [2, 1]


def test_a_rung_that_one_of_them_was_in_alone_compares_nothing():
    assert not trial(1, r0=1.2, r1=1.9).is_above(trial(2, r0=1.2, r2=1.3))
    assert trial(1, r1=1.9).beside(trial(2, r0=1.2)) is None


def test_three_that_beat_each_other_in_a_circle_are_ranked_all_the_same():
    assert order(trial(1, r0=1.5, r2=1.2), trial(2, r1=1.5, r2=1.4), trial(3, r0=1.4, r1=1.6)) == [2, 1, 3]


@pytest.mark.parametrize("cut", [(1.9,), (1.9, 1.9)])
def test_a_rung_that_the_budget_cut_tells_nothing_apart_and_raises_nobody(cut):
    one, other = trial(1, r0=1.2, r1=cut), trial(2, r0=1.5, r1=(1.1,) * len(cut))
    assert one.last.rung == 0
    assert not one.is_above(other)
    assert order(one, other) == [2, 1]


def test_what_was_asked_one_repeat_stands_behind_what_was_asked_all():
    assert order(trial(1, r0=(1.9,)), trial(2, r0=1.2)) == [2, 1]


def test_of_one_repeat_each_no_setting_helps():
    with_setting, bare = trial(1, USELESS, r0=1.2, r1=(1.5,)), trial(1, r0=1.2, r1=(1.2,))
    assert not helps(with_setting, bare)
    assert ranked([with_setting, bare], [with_setting, bare]) == [bare, with_setting]


@pytest.mark.parametrize(("budget", "cut_in"), [(200, None), (300, None), (300, 2)])
def test_no_plan_is_chosen_that_was_clearly_slower_beside_another(budget, cut_in):
    for seed in range(20):
        found = searched(Noisy(seed, budget, cut_in=cut_in), space(device=H200))
        chosen = [t for t in found.trials.values() if t.last and t.candidate.shape]
        assert found.best is None or not any(one.is_above(found.best) for one in chosen)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_no_rung_asks_one_candidate_alone(capacity):
    for budget in range(120, 420, 20):
        bench = Noisy(budget, budget, capacity, start_s=50.0)
        searched(bench, space())
        rungs = defaultdict(list)
        for rung, _, batch in bench.asked:
            rungs[rung] += batch
        assert all(len(asked) > 1 for rung, asked in rungs.items() if rung)


@pytest.mark.parametrize("cut_in", [2, 3])
def test_a_search_that_is_cut_chooses_hardly_more_useless_settings_than_one_that_is_not(cut_in):
    searches = [searched(Noisy(seed, cut_in=cut_in), space(device=H200)) for seed in range(40)]
    assert sum(bool(found.best.candidate.options) for found in searches) <= 6  # 13 and 15 where one repeat counts
