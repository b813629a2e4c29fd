import pytest

from tasks.common.files import read_json, read_jsonl, write_json, write_jsonl
from tasks.common.prompts import PROMPTS
from tasks.common.responses import RESPONSES
from tasks.common.target import load_tokenizer

RECORDS = "Every prompt has exactly one answer or one recorded failure"
PATH = RESPONSES / "train.jsonl"


def edit(number: int, **changes) -> str:
    """Change an answer in place; returns its id."""
    rows = list(read_jsonl(PATH))
    rows[number] |= changes
    write_jsonl(PATH, rows)
    return rows[number]["id"]


def row(number: int) -> dict:
    return list(read_jsonl(PATH))[number]


def edit_manifest(**changes) -> None:
    path = RESPONSES / "manifest.json"
    write_json(path, read_json(path) | changes)


def test_the_targets_own_answers_pass(run, judge):
    verdict = judge("responses")
    assert verdict.error == ""
    assert verdict.report["figures"]["answers"] == 12


def test_a_lost_answer_is_named(run, judge):
    lost = row(2)["id"]
    write_jsonl(PATH, [r for r in read_jsonl(PATH) if r["id"] != lost])
    assert judge("responses").samples(RECORDS) == [lost]


def test_a_prompt_answered_twice_is_named(run, judge):
    write_jsonl(PATH, [*read_jsonl(PATH), row(1)])
    assert judge("responses").samples(RECORDS) == [row(1)["id"]]


def test_an_answer_to_a_prompt_that_has_changed_since_is_named(run, judge):
    prompts = list(read_jsonl(PROMPTS / "train.jsonl"))
    prompts[0]["messages"][0]["content"] += " now"
    write_jsonl(PROMPTS / "train.jsonl", prompts)
    assert judge("responses").samples("Every answer belongs to a prompt of its split, word for word") == [
        prompts[0]["id"]
    ]


def test_failures_pass_up_to_their_share_and_then_come_with_the_reason(run, judge):
    failed = row(0)["id"]
    write_jsonl(PATH, list(read_jsonl(PATH))[1:])
    write_jsonl(RESPONSES / "failures.jsonl", [{"split": "train", "id": failed, "reason": "empty_answer"}])
    edit_manifest(splits={"train": {"answers": 7, "failed": 1}, "heldout": {"answers": 4}})
    assert judge("responses", gates={"max_failed_share": 0.1}).error == ""
    verdict = judge("responses", gates={"max_failed_share": 0.05})
    assert verdict.outcome("failed") == ["At most gates.max_failed_share of the prompts have no answer"]
    assert "empty_answer" in verdict.error


def test_a_system_prompt_that_the_template_does_not_add_is_found_with_its_place(run, judge):
    shifted = edit(4, prompt_token_ids=[1, 9, 9, 2, *row(4)["prompt_token_ids"]])
    verdict = judge("responses")
    sentence = "The prompt's token ids are those of its messages under the target's template"
    assert verdict.outcome("failed") == [sentence]
    assert verdict.samples(sentence) == [shifted]
    assert "from position 1: stored [9, 9, 2]" in verdict.error


def test_text_of_other_tokens_is_named(run, judge):
    changed = edit(5, text="Paris.")
    verdict = judge("responses")
    assert verdict.outcome("failed") == ["The text is what its token ids decode to"]
    assert verdict.samples("The text is what its token ids decode to") == [changed]


def test_an_empty_answer_is_named(run, judge):
    emptied = edit(5, text=" ")
    assert judge("responses").samples("No answer is empty") == [emptied]


def test_an_id_beyond_the_vocabulary_is_named(run, judge):
    foreign = edit(6, output_token_ids=[320, *row(6)["output_token_ids"][1:]])
    assert judge("responses").samples("Every token id is in the target's vocabulary") == [foreign]


@pytest.mark.parametrize("last_id, reason", [(7, "stop"), (2, "length")])
def test_a_cut_answer_that_passes_as_whole_is_named(run, judge, last_id, reason):
    ids = [*row(3)["output_token_ids"][:10], last_id]
    text = load_tokenizer().decode(ids, skip_special_tokens=True)
    wrong = edit(3, output_token_ids=ids, text=text, finish_reason=reason)
    verdict = judge("responses")
    sentence = "The finish reason agrees with the last token: stop at a stop token, else length"
    assert verdict.outcome("failed") == [sentence]
    assert verdict.samples(sentence) == [wrong]


def test_cut_answers_are_named_when_too_many(run, judge):
    cut = [
        r["id"]
        for split in ("train", "heldout")
        for r in read_jsonl(RESPONSES / f"{split}.jsonl")
        if r["finish_reason"] == "length"
    ]
    verdict = judge("responses", gates={"max_truncated_share": 0})
    assert verdict.samples("At most gates.max_truncated_share of the answers were cut at the limit") == cut


def test_a_share_without_a_limit_says_so_and_what_it_is(run, judge):
    edit(0, finish_reason="length", output_token_ids=row(0)["output_token_ids"][:1])
    finding = judge("responses").findings[
        "No limit set on how many of the answers were cut at the limit (gates.max_truncated_share: 1.0)"
    ]
    assert finding["expected"] == "no limit set"
    assert finding["observed"].startswith("met by ") and finding["observed"].endswith(" of 12 answers")


@pytest.mark.parametrize("field", ["target_sha256", "tokenizer_sha256"])
def test_answers_of_another_model_are_refused(run, judge, field):
    edit_manifest(**{field: "0" * 64})
    (sentence,) = judge("responses").outcome("failed")
    assert judge("responses").samples(sentence) == [field]


def test_answers_without_provenance_are_refused(run, judge):
    edit_manifest(sampling={})
    error = judge("responses").error
    assert "absent" in error
    assert "delete artifacts/responses, then `dvc repro`" in error  # --force would keep the answers


def test_a_loop_is_a_warning(run, judge):
    ids = [70] * 12
    loop = edit(7, output_token_ids=ids, text=load_tokenizer().decode(ids), finish_reason="length")
    verdict = judge("responses")
    assert verdict.error == ""
    (sentence,) = verdict.outcome("warned")
    assert loop in verdict.samples(sentence)
