import json
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, read_jsonl, write_jsonl
from tasks.common.params import Regenerate, Target
from tasks.common.prompts import PROMPTS, Prompt
from tasks.common.responses import RESPONSES, read_responses
from tasks.common.server_plan import baseline_plan
from tasks.common.target import TARGET, load_model, load_tokenizer, render_prompt
from tasks.prepare_target.prepare import prepare_target
from tasks.regenerate_responses import engines
from tasks.regenerate_responses import regenerate as regenerate_module
from tasks.regenerate_responses.journal import Journal
from tasks.regenerate_responses.regenerate import regenerate


def write_prompts(train: int, heldout: int = 1) -> None:
    for split, count in (("train", train), ("heldout", heldout)):
        rows = [
            Prompt(
                f"{split}-{n}",
                "chat",
                "test",
                [{"role": "user", "content": f"what is {split} {n * n}? " * (1 + n % 3)}],
            )
            for n in range(count)
        ]
        write_jsonl(PROMPTS / f"{split}.jsonl", (row.to_row() for row in rows))


@pytest.fixture
def params(project, tiny_params):
    return tiny_params(regenerate={"max_new_tokens": 8, "batch_size": 3})


def test_answers_are_the_targets_own_greedy_tokens_in_prompt_order(params):
    write_prompts(7)
    regenerate(params)
    answers = list(read_responses("train"))
    assert [a.id for a in answers] == [f"train-{n}" for n in range(7)]
    model, tokenizer = load_model(params.target), load_tokenizer()
    for answer in answers:
        assert answer.prompt_token_ids == render_prompt(tokenizer, answer.messages)
        alone = model.generate(torch.tensor([answer.prompt_token_ids]), max_new_tokens=8, do_sample=False)
        assert answer.output_token_ids == alone[0, len(answer.prompt_token_ids) :].tolist()
        assert answer.loss_mask == [0] * len(answer.prompt_token_ids) + [1] * len(answer.output_token_ids)


def test_the_targets_generation_config_changes_no_answer(params, tiny_params, tiny_model_folder, tmp_path):
    write_prompts(3)
    regenerate(params)
    plain = [answer.output_token_ids for answer in read_responses("train")]
    model = shutil.copytree(tiny_model_folder, tmp_path / "penalised")
    config = model / "generation_config.json"
    config.write_text(json.dumps(read_json(config) | {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}))
    prepare_target(Target(model=str(model)), TARGET)
    shutil.rmtree(RESPONSES)
    regenerate(tiny_params(target={"model": str(model)}, regenerate={"max_new_tokens": 8, "batch_size": 3}))
    answers = list(read_responses("train"))
    assert [answer.output_token_ids for answer in answers] == plain
    penalised = load_model(Target(model=str(model))).generate(
        torch.tensor([answers[0].prompt_token_ids]), max_new_tokens=8, do_sample=False
    )
    assert penalised[0, len(answers[0].prompt_token_ids) :].tolist() != plain[0]


def test_a_tokenizer_without_a_pad_token_will_do(params):
    write_prompts(3)
    regenerate(params)
    before = (RESPONSES / "train.jsonl").read_bytes()
    tokenizer = load_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(TARGET)
    assert load_tokenizer().pad_token_id is None
    shutil.rmtree(RESPONSES)
    regenerate(params)
    assert (RESPONSES / "train.jsonl").read_bytes() == before


def test_stop_token_ends_the_answer_and_is_kept():
    request = engines.Request("train", "x", [5])
    assert engines._cut_at_stop(request, [7, 2, 2, 2], (2,)) == engines.Answer(request, [7, 2], "stop")
    assert engines._cut_at_stop(request, [7, 8], (2,)) == engines.Answer(request, [7, 8], "length")


def interrupt_after(monkeypatch, groups: int):
    """Let the engine die after so many groups; returns the requests that each later run asks for."""
    asked, real = [], engines._generate_in_batches

    def dying(model, settings, requests):
        asked.append([request.id for request in requests])
        for count, group in enumerate(real(model, settings, requests)):
            if len(asked) == 1 and count == groups:
                raise KeyboardInterrupt
            yield group

    monkeypatch.setattr(engines, "_generate_in_batches", dying)
    return asked


def test_a_killed_run_goes_on_where_it_was_with_the_same_bytes(params, monkeypatch):
    write_prompts(7)
    regenerate(params)
    whole = (RESPONSES / "train.jsonl").read_bytes()
    for path in RESPONSES.iterdir():
        path.unlink()
    asked = interrupt_after(monkeypatch, groups=1)
    with pytest.raises(KeyboardInterrupt):
        regenerate(params)
    with open(RESPONSES / "journal.jsonl", "ab") as journal:
        journal.write(b'{"split": "train", "id": "train-0", "outp')  # a writer killed in mid-line
    regenerate(params)
    assert len(asked[0]) == 8 and len(asked[1]) == 5
    assert (RESPONSES / "train.jsonl").read_bytes() == whole
    assert not (RESPONSES / "journal.jsonl").exists()


def test_a_new_prompt_costs_only_itself(params, monkeypatch):
    write_prompts(4)
    regenerate(params)
    asked = interrupt_after(monkeypatch, groups=99)
    write_prompts(5)
    regenerate(params)
    assert asked == [["train-4"]]
    assert [a.id for a in read_responses("train")] == [f"train-{n}" for n in range(5)]


def test_other_settings_start_anew(params, tiny_params, monkeypatch, capsys):
    write_prompts(2)
    regenerate(params)
    asked = interrupt_after(monkeypatch, groups=99)
    regenerate(tiny_params(regenerate={"max_new_tokens": 5}))
    assert sorted(asked[0]) == ["heldout-0", "train-0", "train-1"]
    assert "starting anew" in capsys.readouterr().out
    assert all(len(a.output_token_ids) <= 5 for a in read_responses("train"))


def test_a_library_upgrade_starts_anew(params, monkeypatch):
    write_prompts(2)
    regenerate(params)
    asked = interrupt_after(monkeypatch, groups=99)
    monkeypatch.setattr(regenerate_module, "result_versions", lambda: {"torch": "99"})
    regenerate(params)
    assert sorted(asked[0]) == ["heldout-0", "train-0", "train-1"]


@pytest.mark.parametrize(
    "engine, changed, anew",
    [
        ("sglang", {"context_length": 512}, True),
        ("sglang", {"max_total_tokens": 4096}, True),
        ("sglang", {"extra_args": ["--quantization", "fp8"]}, True),
        ("sglang", {"port": 30001}, False),
        ("sglang", {"max_running_requests": 4}, False),
        ("transformers", {"context_length": 512}, False),
    ],
)
def test_what_bounds_or_bends_the_answers_of_a_server_starts_anew(
    params, tiny_params, monkeypatch, engine, changed, anew
):
    asked = []

    @contextmanager
    def canned(params):
        yield lambda requests: (asked.append(r.id) or [engines.Answer(r, [40, 41], "length")] for r in requests)

    monkeypatch.setattr(regenerate_module, "open_engine", canned)
    write_prompts(2)
    regenerate(tiny_params(regenerate={"engine": engine}))
    asked.clear()
    regenerate(tiny_params(regenerate={"engine": engine}, serve=changed))
    assert sorted(asked) == (["heldout-0", "train-0", "train-1"] if anew else [])


def test_manifest_carries_the_provenance(params):
    write_prompts(2)
    manifest = regenerate(params)
    assert manifest == read_json(RESPONSES / "manifest.json")
    assert manifest["target_sha256"] == read_json(PROMPTS.parent / "target" / "draftline.json")["target_sha256"]
    assert manifest["splits"]["train"]["prompts"] == 2


def test_empty_answer_is_a_recorded_failure_and_is_asked_again(params, monkeypatch):
    write_prompts(2)

    def silent(model, settings, requests):
        asked.append(sorted(request.id for request in requests))
        yield [engines.Answer(r, [2] if r.id == "train-1" else [40, 41], "stop") for r in requests]

    asked: list = []
    monkeypatch.setattr(engines, "_generate_in_batches", silent)
    manifest = regenerate(params)
    assert list(read_jsonl(RESPONSES / "failures.jsonl")) == [
        {"split": "train", "id": "train-1", "reason": "empty_answer"}
    ]
    assert manifest["splits"]["train"] == {"prompts": 2, "answers": 1, "output_tokens": 2, "stop": 1, "failed": 1}
    regenerate(params)
    assert asked[1] == ["train-1"]


def test_journal_of_another_run_is_not_read(tmp_path):
    Journal(tmp_path, "one").append([{"split": "train", "id": "a", "x": 1}])
    assert ("train", "a") in Journal(tmp_path, "one")
    assert ("train", "a") not in Journal(tmp_path, "two")
    assert json.loads((tmp_path / "journal.jsonl").read_text()) == {"key": "two"}


class ScriptedServer:
    """Answers request [n] with [n] at once, but refuses some and lets some take until they are released."""

    def __init__(self, refused: tuple[int, ...] = (), slow: tuple[int, ...] = ()):
        self.refused, self.slow, self.release = refused, slow, threading.Event()
        self.asked: list[int] = []
        self.sampling: list[dict] = []

    def generate(self, input_ids: list[int], sampling: dict):
        (number,) = input_ids
        self.asked.append(number)
        self.sampling.append(sampling)
        if number in self.refused:
            raise DraftlineError(f"refused {number}")
        self.release.wait(10 if number in self.slow else 0.05)
        return SimpleNamespace(output_ids=[number], finish_reason="length")


def asked_of(server: ScriptedServer, **settings):
    requests = [engines.Request("train", f"train-{n}", [n]) for n in range(40)]
    return engines._generate_on_server(server, Regenerate(engine="sglang", batch_size=3, **settings), requests)


def test_answers_that_came_while_a_group_was_written_are_one_group():
    server, groups = ScriptedServer(), []
    for group in asked_of(server):
        groups.append([answer.output_token_ids[0] for answer in group])
        time.sleep(0.3)  # a slow disk: three threads answer 18 requests meanwhile
    assert sorted(number for group in groups for number in group) == list(range(40))
    assert len(groups) < 20


def test_a_refused_request_drops_the_queue_and_keeps_what_is_in_flight():
    server, kept = ScriptedServer(refused=(4,)), []
    with pytest.raises(DraftlineError, match="refused 4"):
        for group in asked_of(server):
            kept += [answer.output_token_ids[0] for answer in group]
    assert len(server.asked) < 12
    assert sorted([*kept, 4]) == sorted(server.asked)


def test_a_stage_that_is_stopped_waits_for_no_answer_and_keeps_those_that_are_there(monkeypatch):
    def until_stopped(futures):
        while sum(future.done() for future in futures) < 4:
            time.sleep(0.01)
        raise SystemExit(143)
        yield

    server, kept = ScriptedServer(slow=tuple(range(4, 40))), []
    monkeypatch.setattr(engines, "_completed", until_stopped)
    started = time.monotonic()
    with pytest.raises(SystemExit):
        for group in asked_of(server):
            kept += [answer.output_token_ids[0] for answer in group]
    assert time.monotonic() - started < 5
    server.release.set()
    assert sorted(kept) == [0, 1, 2, 3]
    time.sleep(0.2)
    assert len(server.asked) <= 7


def test_the_queue_is_dropped_before_the_server_is_stopped(params, monkeypatch):
    """Else its threads would ask all that waits of a server that is gone."""
    order = []

    @contextmanager
    def engine(params):
        def generate(requests):
            try:
                yield [engines.Answer(requests[0], [40], "length")]
            finally:
                order.append("queue")

        try:
            yield generate
        finally:
            order.append("server")

    def full_disk(self, records):
        raise OSError("no space left")

    write_prompts(2)
    monkeypatch.setattr(regenerate_module, "open_engine", engine)
    monkeypatch.setattr(Journal, "append", full_disk)
    with pytest.raises(OSError):
        regenerate(params)
    assert order == ["queue", "server"]


def test_requests_state_all_that_a_server_could_fill_in_otherwise_and_a_seed_of_their_own():
    server = ScriptedServer()
    list(asked_of(server, temperature=0.7, seed=3))
    assert {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}.items() <= server.sampling[0].items()
    assert server.sampling[0]["temperature"] == 0.7
    assert len({sampling["sampling_seed"] for sampling in server.sampling}) == 40


def test_a_server_that_answers_each_prompt_once_keeps_no_prefix_cache(project, tiny_params):
    params = tiny_params(serve={"context_length": 256})
    baseline, answering = baseline_plan(params).flags, engines.answering_plan(params).flags
    assert [flag.name for flag in answering if flag not in baseline] == ["--disable-radix-cache"]


def test_a_seed_that_sglang_would_leave_aside_is_refused(tiny_params):
    sampled = {"engine": "sglang", "temperature": 0.7, "seed": 3}
    with (
        pytest.raises(DraftlineError, match="--enable-deterministic-inference"),
        engines.open_engine(tiny_params(regenerate=sampled)),
    ):
        pass
    for section in ({}, {"seed": 0}, {"temperature": 0}):
        extra = () if section else ("--enable-deterministic-inference",)
        engines._require_seed_to_count(tiny_params(regenerate=sampled | section, serve={"extra_args": extra}))
