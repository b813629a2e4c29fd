import json

import pytest
import torch

from tasks.common.files import read_json, read_jsonl, write_jsonl
from tasks.common.prompts import PROMPTS, Prompt
from tasks.common.responses import RESPONSES, read_responses
from tasks.common.target import load_model, load_tokenizer, render_prompt
from tasks.regenerate_responses import engines
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
