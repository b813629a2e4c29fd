"""The norms of a run against those of the run whose report is committed, in a real repository; nothing is replayed."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.collect_prompts.collect import collect_prompts
from tasks.common.files import read_json, write_json, write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample
from tasks.common.params import ContractParams
from tasks.common.target import load_tokenizer
from tasks.dump_hidden_states.dump import dump
from tasks.gates.report import GATES
from tasks.regenerate_responses.regenerate import regenerate
from tests.stored import close_again, copy_of, write_shard

REPORT = GATES / "hidden_states.json"
AS_BEFORE = "The median norm of every slot is as in the run whose report is committed"
SLOTS = ("slot 0 (layer 1)", "slot 1 (layer 3)", "slot 2 (layer 4)", "the last state")


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


def commit() -> None:
    git("add", REPORT.as_posix())
    git("commit", "--message", "a run")


@pytest.fixture
def committed(run, judge):
    """The finished run, gated, its report committed."""
    git("init")
    assert held_against(judge("hidden_states")) == "nothing committed"
    commit()


def rewrite(change) -> None:
    """Every sample changed, of both splits, with the checksums of what is there now."""
    for folder in HIDDEN_STATES.iterdir():
        states = HiddenStates(folder)
        samples = iter([change(copy_of(states.read(index))) for index in range(len(states))])
        for shard in states.shards:
            own = [next(samples) for _ in range(shard["samples"])]
            write_shard(folder, shard["name"], own, read_json(folder / f"{shard['name']}.json")["plan_sha256"])
        close_again(states)


def scale_slot_1(sample: Sample) -> Sample:
    sample.aux[:, 1] *= 3
    return sample


def held_against(verdict) -> str:
    return re.search(r"<b[^>]*>([^<]*)</b>\s*<span>held against", verdict.page)[1]


def test_the_same_states_pass_and_leave_the_same_record(committed, judge):
    before = REPORT.read_bytes()
    verdict = judge("hidden_states")
    assert (verdict.error, held_against(verdict)) == ("", "committed run")
    assert AS_BEFORE in verdict.page
    assert REPORT.read_bytes() == before  # training depends on it, and nothing has changed
    for name in SLOTS:
        assert f">{name}</td>" in verdict.page


def test_a_run_with_a_scaled_slot_names_it_with_both_norms_and_the_way_out(committed, judge):
    then = read_json(REPORT)["record"]["norms"]["norm_slot_1"]
    rewrite(scale_slot_1)
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == [AS_BEFORE]
    [(slot, *said)] = re.findall(
        r"    (.*): outside (\S+) … (\S+): the median norm is (\S+), and was (\S+)", verdict.error
    )
    assert slot == SLOTS[1]
    assert [float(value) for value in said] == pytest.approx(
        [then["lowest"], then["highest"], 3 * then["median"], then["median"]], rel=0.01
    )
    assert "forget the earlier run: `git rm --cached reports/gates/hidden_states.json`" in verdict.error


def test_slots_that_changed_places_are_both_named(committed, judge):
    rewrite(lambda sample: replace(sample, aux=sample.aux.flip(1)))
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == [AS_BEFORE]
    assert verdict.samples(AS_BEFORE) == [SLOTS[0], SLOTS[2]]


def test_states_of_another_layer_are_found_without_a_replay(committed, judge, params):
    manifests = {folder: read_json(folder / "manifest.json") for folder in HIDDEN_STATES.iterdir()}
    dump(params.model_copy(update={"contract": ContractParams(aux_layer_ids=(0, 3, 4))}))
    for folder, honest in manifests.items():
        write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"contract": honest["contract"]})
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == [AS_BEFORE]
    assert verdict.samples(AS_BEFORE) == [SLOTS[0]]


def test_other_prompts_give_states_of_the_same_size(committed, judge, params):
    for split, count in (("train", 5), ("heldout", 3)):
        rows = [
            {"id": f"{split}-{n}", "prompt": f"{n} jumps of the lazy fox over " + f"{split} dogs " * (9 - n)}
            for n in range(count)
        ]
        write_jsonl(Path(f"prompts/{split}.jsonl"), rows)
    collect_prompts(params.prompts, load_tokenizer())
    regenerate(params)
    dump(params)
    verdict = judge("hidden_states")
    assert (verdict.error, held_against(verdict)) == ("", "committed run")
    assert verdict.report["figures"]["samples"] == 8


def test_what_cannot_be_compared_is_not(committed, judge, params):
    other = params.model_copy(update={"contract": ContractParams(aux_layer_ids=(4, 5, 6))})
    dump(other)
    verdict = judge("hidden_states", contract=other.contract.model_dump())
    assert (verdict.error, held_against(verdict)) == ("", "nothing: other contract")
    dump(params.model_copy(update={"dump": params.dump.model_copy(update={"storage_dtype": "float16"})}))
    verdict = judge("hidden_states", dump={"storage_dtype": "float16"})
    assert (verdict.error, held_against(verdict)) == ("", "nothing: other storage type")


@pytest.mark.parametrize("variable", ["GIT_DIR", "PATH"])
def test_a_git_that_does_not_answer_does_not_pass_for_nothing_committed(committed, judge, monkeypatch, variable):
    monkeypatch.setenv(variable, "nowhere")
    verdict = judge("hidden_states")
    assert "reports/gates/hidden_states.json as it is committed: git does not give it" in verdict.error


def test_committing_a_run_that_failed_does_not_make_it_the_measure(committed, judge):
    honest = read_json(REPORT)["record"]
    rewrite(scale_slot_1)
    assert judge("hidden_states").error
    assert read_json(REPORT)["record"] == honest
    commit()
    assert judge("hidden_states").outcome("failed") == [AS_BEFORE]


def test_a_first_run_that_failed_or_an_older_report_is_no_measure(committed, judge):
    for report in ({"gate": "hidden_states", "passed": False}, {"gate": "hidden_states", "passed": True}):
        write_json(REPORT, report)
        commit()
        assert held_against(judge("hidden_states")) == "nothing: no norms committed"


def test_a_first_run_that_fails_leaves_no_record(run, judge):
    rewrite(lambda sample: replace(sample, aux=sample.aux * float("nan")))
    assert judge("hidden_states").error
    assert "record" not in read_json(REPORT)


def test_an_earlier_run_that_is_forgotten_is_no_measure(committed, judge):
    rewrite(scale_slot_1)
    assert judge("hidden_states").error
    git("rm", "--cached", REPORT.as_posix())
    git("commit", "--message", "the states changed, and rightly so")
    verdict = judge("hidden_states")
    assert (verdict.error, held_against(verdict)) == ("", "nothing committed")
    git("add", REPORT.as_posix())
    assert held_against(judge("hidden_states")) == "nothing committed"  # staged is not committed
    commit()
    assert held_against(judge("hidden_states")) == "committed run"


def test_a_run_in_a_folder_of_a_larger_repository_has_a_report_of_its_own(finished_run, tmp_path, judge, monkeypatch):
    shutil.copytree(finished_run, tmp_path / "drafts")
    monkeypatch.chdir(tmp_path / "drafts")
    git("init", str(tmp_path))
    judge("hidden_states")
    commit()
    assert held_against(judge("hidden_states")) == "committed run"


def test_without_a_repository_there_is_nothing_to_compare_with(committed, judge):
    shutil.rmtree(".git")
    verdict = judge("hidden_states")
    assert (verdict.error, held_against(verdict)) == ("", "nothing committed")
