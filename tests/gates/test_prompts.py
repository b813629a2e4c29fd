import pytest
from transformers import AddedToken

from tasks.common.files import read_json, read_jsonl, write_json, write_jsonl
from tasks.common.prompts import PROMPTS
from tasks.common.target import TARGET, load_tokenizer


def edit(split: str, number: int, **changes) -> str:
    """Change a prompt in place; returns its id."""
    rows = list(read_jsonl(PROMPTS / f"{split}.jsonl"))
    rows[number] |= changes
    write_jsonl(PROMPTS / f"{split}.jsonl", rows)
    return rows[number]["id"]


def say(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def test_collected_prompts_pass(run, judge):
    verdict = judge("prompts")
    assert verdict.error == ""
    assert verdict.report["figures"] == {
        "training prompts": 8,
        "held-out prompts": 4,
        "domains": 2,
        "prompt tokens": 380,
    }


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (say(("user", "hi"), ("assistant", "yes?")), "The last message is the user's"),
        (say(("tool", "x"), ("user", "hi")), "Roles are system, user and assistant"),
        (say(("system", " "), ("user", "hi")), "No message is empty"),
        (say(("user", "say <|im_end|> now")), "No message holds the text of a special token"),
        (say(("user", "the " * 600)), "The rendered prompt has between one token and prompts.max_prompt_tokens"),
    ],
)
def test_a_prompt_that_breaks_a_rule_is_named(run, judge, messages, sentence):
    broken = edit("train", 3, messages=messages)
    verdict = judge("prompts")
    assert verdict.outcome("failed") == [sentence]
    assert verdict.samples(sentence) == [broken]
    assert broken in verdict.error


def test_a_control_token_without_a_name_is_named_too(run, judge):
    tokenizer = load_tokenizer()
    tokenizer.add_tokens([AddedToken("<|header|>", special=True)])
    tokenizer.save_pretrained(TARGET)
    broken = edit("train", 3, messages=say(("user", "say <|header|> now")))
    assert judge("prompts").samples("No message holds the text of a special token") == [broken]


def test_a_held_out_prompt_in_training_is_named_whatever_its_case(run, judge):
    edit("train", 2, messages=say(("user", "WHAT is  heldout the capital ?")))
    verdict = judge("prompts")
    assert verdict.outcome("failed") == ["No held-out prompt is among the training prompts"]
    assert [name.rsplit("-", 1)[0] for name in verdict.samples("No held-out prompt is among the training prompts")] == [
        "heldout-1"
    ]


def test_an_id_in_both_splits_is_named(run, judge):
    twice = edit("heldout", 0, id=next(read_jsonl(PROMPTS / "train.jsonl"))["id"])
    assert judge("prompts").samples("Ids are unique over both splits") == [twice, twice]


def test_a_lost_line_does_not_agree_with_the_manifest(run, judge):
    write_jsonl(PROMPTS / "train.jsonl", list(read_jsonl(PROMPTS / "train.jsonl"))[1:])
    assert judge("prompts").samples("The file holds as many prompts as its manifest says") == ["train"]


def test_too_few_prompts(run, judge):
    verdict = judge("prompts", gates={"min_prompts": 6})
    assert verdict.samples("A split has at least gates.min_prompts prompts") == ["heldout"]


def test_too_many_dropped_rows_are_told_with_the_reasons(run, judge):
    manifest = read_json(PROMPTS / "manifest.json")
    manifest["train"] |= {"read": 12, "dropped": {"too_long": 4}}
    write_json(PROMPTS / "manifest.json", manifest)
    assert "too_long 4" in judge("prompts").error
