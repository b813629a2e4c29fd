"""The search over a law of speeds: what it starts, what it leaves, when it ends, and what it finds."""

from dataclasses import replace

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.tune_server.candidates import PLAIN, Candidate, Shape
from tasks.tune_server.options import Device
from tasks.tune_server.search import Search
from tasks.tune_server.space import Space
from tests.tune_server.bench import ANSWER_TOKENS, PLAIN_STEP_S, Bench, Noisy, Questions

LLAMA = "LlamaForCausalLM"


def space(trained: int = 7, device: Device = Device(None), architecture: str = LLAMA, **serve) -> Space:  # noqa: B008
    params = Params.model_validate(
        {
            "train_draft": {"ttt_length": trained},
            "serve": {"max_running_requests": 1} | serve,
            "benchmark": {"concurrency": [1]},
        }
    )
    return Space.of(params, 1, architecture, device)


def searched(bench: Bench, over: Space) -> Search:
    search = Search(over, bench)
    search.run()
    return search


def fastest(bench: Bench, over: Space) -> float:
    everything = [*over.required, *over.shapes]
    return max(bench.speedup(c) for c in everything if c not in over.unfit)


# --- what is found


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_the_best_is_as_fast_as_any_that_there_is(ratio):
    bench = Bench(budget_s=3000, ratio=ratio)
    over = space()
    found = searched(bench, over)
    assert bench.speedup(found.best.candidate) >= 0.97 * fastest(bench, over)


def test_hardly_any_acceptance_asks_for_the_shortest_chain():
    assert searched(Bench(ratio=0.05), space()).best.candidate.shape == Shape(1, 1, 2)


def test_a_setting_that_helps_is_in_the_best_and_one_that_does_not_is_not():
    effect = {"triton": 1.3, "flashinfer": 0.8, "fa3": 1.1, "no prefill graphs": 0.9}
    found = searched(Bench(3000, effect=effect), space(device=Device((9, 0), True)))
    assert [option.name for option in found.best.candidate.options] == ["triton"]


def test_settings_that_help_alone_are_tried_together():
    effect = {"fa3": 1.1, "graphs of 1 request": 1.2, "no prefill graphs": 0.9, "graphs without padding": 0.9}
    effect |= {
        "graphs up to 1 request": 1.0,
        "at most 1 request": 0.9,
        "at most 2 requests": 0.9,
        "triton": 0.9,
        "flashinfer": 0.9,
    }
    found = searched(Bench(3000, effect=effect), space(device=Device((9, 0), True), max_running_requests=8))
    assert {option.name for option in found.best.candidate.options} == {"fa3", "graphs of 1 request"}


def test_settings_of_one_kind_are_not_tried_together():
    effect = {"fa3": 1.1, "triton": 1.2}
    found = searched(Bench(3000, effect=effect), space(device=Device((9, 0), True)))
    for candidate in found.trials:
        groups = [option.group for option in candidate.options]
        assert len(groups) == len(set(groups))


def test_the_best_settings_are_compared_with_a_plain_server_that_has_them_too():
    found = searched(Bench(3000, effect={"triton": 1.3}), space(device=Device((9, 0), True)))
    alike = Candidate(None, found.best.candidate.options)
    assert found.trials[alike].last.rung == found.best.last.rung
    assert found.trials[alike].last.speedup == pytest.approx(1.3)


def with_settings(**law) -> list[set[str]]:
    searches = (searched(Noisy(seed, **law), space(device=Device((9, 0), True))) for seed in range(40))
    return [{option.name for option in found.best.candidate.options} for found in searches]


def test_noise_chooses_no_useless_setting():
    assert sum(map(bool, with_settings())) <= 4  # more than half of them where the fastest of all is taken


def test_a_setting_that_helps_by_more_than_the_noise_is_found_in_it():
    assert sum("triton" in names for names in with_settings(effect={"triton": 1.15})) >= 36


def test_settings_that_the_repeats_do_not_tell_from_none_are_not_tried_together():
    effect = {"fa3": 1.015, "no prefill graphs": 1.015}  # repeats of the bench vary by 1 % both ways
    found = searched(Bench(3000, effect=effect), space(device=Device((9, 0), True)))
    assert not found.best.candidate.options
    assert all(len(candidate.options) < 2 for candidate in found.trials)


def test_settings_are_asked_beside_the_same_numbers_without_from_rung_to_rung():
    effect = {"triton": 1.25, "flashinfer": 1.2, "fa3": 1.15, "no prefill graphs": 1.1, "graphs without padding": 1.1}
    effect |= {"graphs of 1 request": 1.12, "graphs up to 1 request": 1.11, "at most 1 request": 1.05}
    bench = Bench(3000, capacity=40, effect=effect)
    best = searched(bench, space(device=Device((9, 0), True), max_running_requests=8)).best.candidate
    assert {"triton", "no prefill graphs"} < {option.name for option in best.options}
    for _, _, batch in bench.asked:
        drafted = [candidate for candidate in batch if candidate.shape and candidate.options]
        bare = {candidate.shape for candidate in batch if not candidate.options}
        assert {candidate.shape for candidate in drafted} <= bare


def test_a_backend_that_refuses_trees_is_not_tried_with_one():
    found = searched(Bench(3000, ratio=0.5), space(device=Device((10, 0), True)))
    assert found.best.candidate.shape.topk > 1
    assert not any(option.chains_only for candidate in found.trials for option in candidate.options)


def test_a_plain_server_that_gains_more_is_still_no_plan_for_the_draft():
    found = searched(Bench(3000, ratio=0.05, effect={"triton": 3.0}), space(device=Device((9, 0), True)))
    alike = found.trials[Candidate(None, found.best.candidate.options)]
    assert alike.last.speedup > found.best.last.speedup
    assert found.best.candidate.shape == Shape(1, 1, 2)


def test_later_rungs_count_more_than_a_minute_in_which_all_was_faster():
    class Slowing(Bench):
        def _result(self, candidate, questions, rung):
            found = super()._result(candidate, questions, rung)
            return replace(found, ratios=tuple(ratio * 0.5**rung for ratio in found.ratios))

    bench = Slowing(3000)
    found = searched(bench, space())
    assert found.best.last.rung == max(trial.last.rung for trial in found.trials.values() if trial.last)
    assert bench.speedup(found.best.candidate) >= 0.97 * fastest(bench, space())


# --- what is always measured


def test_the_servers_to_compare_with_are_in_the_first_rung_and_in_the_last():
    bench = Bench(3000)
    over = space(num_steps=4, num_draft_tokens=5)
    found = searched(bench, over)
    assert set(over.rows) == {"automatic", "5/4/8", "3/1/4", "current"}
    for candidate in over.rows.values():
        assert {found.trials[candidate].results[0].rung, found.trials[candidate].last.rung} == {0, found.best.last.rung}


@pytest.mark.parametrize(
    ("capacity", "together", "trained", "trees"),
    [
        (8, True, 7, ["5/4/8", "7/8/32", "7/4/32", "7/8/16"]),  # room for 7, of which 3/1/4, 4/1/5 and 7/1/8 are chains
        (8, True, 4, ["5/4/8", "4/8/32", "4/4/32", "4/8/16"]),
        (40, False, 7, []),  # each start costs its time
        (4, True, 7, ["5/4/8"]),
    ],
)
def test_the_first_start_takes_trees_along_as_far_as_there_is_room(capacity, together, trained, trees):
    bench = Bench(300, capacity, together, start_s=60.0)
    searched(bench, space(trained=trained, num_steps=4, num_draft_tokens=5))
    _, _, first = bench.asked[0]
    assert [str(candidate.shape) for candidate in first if candidate.shape.topk > 1] == trees


def test_the_automatic_choice_stands_for_the_shape_that_it_makes():
    over = space()
    assert over.rows["automatic"] is over.rows["5/4/8"]
    assert over.rows["automatic"].is_automatic
    other = space(architecture="Qwen3ForCausalLM")
    assert other.rows["automatic"] is other.rows["3/1/4"] is other.rows["current"]
    assert other.rows["automatic"].shape == Shape(3, 1, 4)


def test_more_steps_than_trained_are_compared_with_and_never_chosen():
    bench = Bench(3000, ratio=0.95)
    over = space(trained=3)
    found = searched(bench, over)
    assert found.trials[over.rows["5/4/8"]].last.speedup > found.best.last.speedup
    assert found.best.candidate.shape.steps <= 3
    assert all(c.shape.steps <= 3 for c in found.trials if c.shape and c not in over.required)
    (note,) = [note for note in over.notes if "train_draft.ttt_length" in note]
    assert note.endswith(
        "For comparison alone: 5/4/8 (automatic)."
    )  # whether there is time to measure it is not known yet


# --- what is left out


def test_what_the_model_rules_out_is_not_started_and_the_numbers_say_why():
    bench = Bench(3000, ratio=0.3)
    found = searched(bench, space())
    started = {candidate for _, _, batch in bench.asked for candidate in batch}
    ruled_out = {c: t.pruned for c, t in found.trials.items() if t.pruned}
    assert ruled_out
    assert started.isdisjoint(ruled_out)
    best = max(bench.speedup(c) for c in started)
    assert all(bench.speedup(c) < best for c in ruled_out)
    assert "times the plain server in decoding" in next(iter(ruled_out.values()))


def test_few_questions_that_are_all_easy_or_all_hard_hardly_ever_rule_out_the_best():
    ruled_out, others = 0, 0
    for seed in range(40):
        bench, over = Questions(seed), space()
        trials = searched(bench, over).trials
        best = max([*over.required, *over.shapes], key=bench.speedup)
        ruled_out += bool(trials[best].pruned)
        others += sum(bool(trial.pruned) for trial in trials.values())
    assert ruled_out <= 2  # 10 where the repeats alone count, which ask the same questions
    assert others > 40 * 5


def test_a_server_that_does_not_start_is_dropped_and_the_search_goes_on():
    bench = Bench(3000, broken=lambda c: c.shape is not None and c.shape.topk > 1)
    over = space()
    found = searched(bench, over)
    assert found.trials[over.rows["5/4/8"]].failed == "refused"
    assert found.best.candidate.shape.topk == 1
    tried = [c for _, _, batch in bench.asked for c in batch if c == over.rows["5/4/8"]]
    assert len(tried) == 1


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6])
def test_servers_that_all_die_after_a_while_end_the_search(batches):
    bench = Bench(3000, broken=lambda c: len(bench.asked) > batches)
    found = searched(bench, space())
    assert found.ended.startswith("Done")
    assert found.best is None or not found.best.failed
    assert not found.has_compared or found.best


def test_the_last_two_that_may_be_chosen_die_in_a_later_rung():
    two = {Shape(3, 1, 4), Shape(7, 1, 8)}
    bench = Bench(3000, broken=lambda c: bench.asked[-1][0] > 0 or c.shape not in two)
    found = searched(bench, space())
    assert found.ended.startswith("Done")
    assert found.best is None
    assert {trial.candidate.shape for trial in found.trials.values() if trial.results} == two


def test_where_every_server_fails_there_is_no_best():
    found = searched(Bench(broken=lambda c: True), space())
    assert found.best is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DraftlineError("the plain server\nfailed"), "Ended early, in rung 1: the plain server failed"),
        (SystemExit(143), "Ended early, in rung 1: SIGTERM."),
        (KeyboardInterrupt(), "Ended early, in rung 1: SIGINT."),
    ],
)
def test_a_search_that_is_ended_says_why_and_keeps_what_was_measured(error, said):
    class Ending(Bench):
        def measure(self, batch, questions, rung, ranked):
            if rung:
                raise error
            return super().measure(batch, questions, rung, ranked)

    search = Search(space(), Ending(3000))
    with pytest.raises(type(error)):
        search.run()
    assert (search.is_complete, search.ended) == (False, said)
    assert search.best is not None


# --- time


@pytest.mark.parametrize("budget", [30, 60, 90, 150, 360, 1000])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_the_search_ends_within_its_budget_with_a_result(budget, together, capacity):
    bench = Bench(budget, capacity, together, start_s=10.0)
    found = searched(bench, space(device=Device((9, 0), True)))
    assert found.best is not None
    assert bench.clock <= budget


def test_a_budget_of_one_start_measures_the_current_server():
    bench = Bench(25, starts_together=False, capacity=2, start_s=10.0)
    over = space()
    found = searched(bench, over)
    assert found.best.candidate == over.rows["current"]
    assert not found.has_compared
    assert len(bench.asked) == 1  # asked again alone it would be compared with no more
    assert "minutes are too short to measure 5/4/8 (automatic), 7/1/8: 2 servers took 20 s to start" in found.shortage


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_rungs_are_numbered_without_holes(capacity):
    for budget in range(30, 400, 10):
        bench = Bench(budget, capacity, starts_together=False, start_s=20.0)
        searched(bench, space())
        rungs = [rung for rung, _, _ in bench.asked]
        assert sorted(set(rungs)) == list(range(max(rungs) + 1))
        assert rungs == sorted(rungs)


def test_beside_servers_that_are_never_chosen_the_current_parameters_are_the_best_of_nothing():
    found = searched(Bench(70, 2, starts_together=False, start_s=20.0), space(trained=3))
    assert found.trials[found.space.rows["5/4/8"]].last
    assert not found.has_compared
    assert "minutes are too short to measure 2/1/3: " in found.shortage


@pytest.mark.parametrize("broken", [False, True])
def test_a_search_that_tried_all_that_it_compares_is_short_of_nothing(broken):
    found = searched(Bench(3000, broken=lambda c: broken and c.shape == Shape(5, 4, 8)), space())
    assert (found.has_compared, found.shortage) == (True, "")


def test_the_first_rung_leaves_time_to_compare_the_best_again():
    bench = Bench(400, capacity=2, start_s=30.0)
    over = space()
    found = searched(bench, over)
    assert {found.trials[candidate].last.rung for candidate in over.rows.values()} != {0}
    assert found.best.last.rung > 0


def test_the_most_promising_shapes_are_started_first():
    over = space()
    search = searched(Bench(cut_after=2, capacity=6), over)
    speeds = [search.prediction.likely(candidate) for candidate in search._not_ruled_out(over.shapes)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1]


def test_what_is_left_at_the_end_asks_more_of_those_that_run_where_the_best_is_one():
    bench = Bench(240, capacity=3, start_s=50.0, starts_together=False)
    found = searched(bench, space())
    (*_, (compared, few, _), (_, more, asked_on)) = bench.asked
    assert few < more
    assert found.best.last.rung == compared + 1
    assert found.best.candidate in asked_on


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_whatever_the_budget_the_best_is_the_fastest_of_all_that_were_measured(together, capacity):
    for budget in range(120, 1000, 40):
        bench, over = Bench(budget, capacity, together, start_s=50.0), space()
        found = searched(bench, over)
        measured = [c for c, trial in found.trials.items() if trial.last and c.shape and c not in over.unfit]
        assert bench.speedup(found.best.candidate) == max(map(bench.speedup, measured))


def test_more_time_asks_more_questions():
    short, long = Bench(200), Bench(2000)
    searched(short, space())
    searched(long, space())
    assert short.asked[-1][1] < long.asked[-1][1] == 64


def test_each_rung_has_fewer_candidates_and_more_questions():
    bench = Bench(3000, effect={"triton": 1.1}, capacity=40)
    searched(bench, space(device=Device((9, 0), True)))
    halving = [(questions, len(batch)) for rung, questions, batch in bench.asked if rung]
    assert [questions for questions, _ in halving[:3]] == [8, 16, 32]
    assert sorted((count for _, count in halving[:3]), reverse=True) == [count for _, count in halving[:3]]


class SlowFirstStart(Bench):
    """Its first start takes 100 s more than those that follow, and is not counted.

    Args:
        answer_s: of the plain server.
    """

    def __init__(self, budget_s, capacity, answer_s, **law):
        super().__init__(budget_s, capacity, **law)
        self._slower = answer_s / (ANSWER_TOKENS * PLAIN_STEP_S)

    def measure(self, batch, questions, rung, ranked):
        self.clock += 0 if self.asked else 100
        return super().measure(batch, questions, rung, ranked)

    def _answer_s(self, candidate):
        return self._slower * super()._answer_s(candidate)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize(("capacity", "answer_s"), [(2, 0.1), (8, 0.1), (8, 1.0)])
def test_no_rung_asks_fewer_questions_than_one_before(ratio, capacity, answer_s):
    for budget in range(300, 900, 20):
        bench = SlowFirstStart(budget, capacity, answer_s, start_s=75.0, ratio=ratio)
        searched(bench, space(device=Device((9, 0), True)))
        asked = [questions for _, questions, _ in bench.asked]
        assert asked == sorted(asked)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("answer_s", [0.1, 1.0])
def test_settings_and_halving_leave_time_to_ask_the_best_beside_what_it_is_compared_with(ratio, answer_s):
    for budget in range(360, 900, 20):
        bench, over = SlowFirstStart(budget, 8, answer_s, start_s=68.0, ratio=ratio), space(device=Device((9, 0), True))
        found = searched(bench, over)
        assert {found.trials[candidate].last.rung for candidate in over.rows.values()} == {found.best.last.rung}
        assert bench.clock <= budget


def test_what_is_only_reckoned_with_is_no_candidate():
    bench = Bench(3000, effect={"triton": 1.2, "no prefill graphs": 1.2})  # the best has one setting, and then both
    found = searched(bench, space(device=Device((9, 0), True)))
    assert len(found.best.candidate.options) == 2
    assert all(trial.results or trial.pruned for trial in found.trials.values())


def test_servers_that_run_are_asked_again_before_others_are_started():
    bench = Bench(3000, capacity=8)
    searched(bench, space())
    starts = bench.clock
    again = Bench(3000, capacity=8, start_s=0.0)
    searched(again, space())
    assert starts - again.clock < 20.0 * len(bench.asked)


def test_what_was_measured_when_the_budget_was_cut_counts():
    bench = Bench(cut_after=1)
    found = searched(bench, space())
    assert found.best is not None
    assert found.ended == "The budget ended in rung 0: what was asked by then counts."


def test_the_plain_server_is_no_candidate():
    found = searched(Bench(), space())
    assert PLAIN not in found.trials
