import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AddedToken

from tasks.collect_prompts.collect import collect_prompts
from tasks.common.conversations import read_folder
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, read_jsonl, write_jsonl
from tasks.common.params import Prompts
from tasks.common.prompts import PROMPTS, read_prompts
from tasks.common.target import TARGET, load_tokenizer

# The user messages 125273 and 129802: the first 32 bits of the hashes of both conversations are a97293ae.
COLLIDING_IN_32_BITS = (125273, 129802)
BUILTIN = Path(__file__).parents[2] / "tasks" / "collect_prompts" / "builtin"


def user(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
def collect(project):
    def run(files: dict[str, list[dict] | bytes], **params) -> dict:
        for name, rows in files.items():
            data = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            (project / "prompts").mkdir(exist_ok=True)
            (project / "prompts" / name).write_bytes(data)
        return collect_prompts(Prompts(folder="prompts", **params), load_tokenizer())

    return run


def test_builtin_set_is_whole(project):
    manifest = collect_prompts(Prompts(folder=str(BUILTIN), max_prompt_tokens=1000), load_tokenizer())
    assert manifest["train"]["prompts"] >= 400
    assert manifest["heldout"]["prompts"] >= 60
    assert set(manifest["train"]["domains"]) == {"chat", "code", "maths", "reasoning", "extraction", "rewriting"}
    assert manifest["train"]["dropped"] == manifest["heldout"]["dropped"] == {}


def test_file_name_or_field_decides_the_split(collect):
    collect({"mine.jsonl": [user("a"), user("b", split="heldout")], "heldout_set.jsonl": [user("c")]})
    assert [p.messages[0]["content"] for p in read_prompts("train")] == ["a"]
    assert [p.messages[0]["content"] for p in read_prompts("heldout")] == ["c", "b"]


def test_heldout_prompt_is_dropped_from_training_and_counted(collect):
    manifest = collect(
        {"a.jsonl": [user("What is  FRANCE?"), user("other")], "heldout.jsonl": [user("what is france?")]}
    )
    assert manifest["train"]["dropped"] == {"in_heldout": 1}
    assert [p.messages[0]["content"] for p in read_prompts("train")] == ["other"]
    assert list(read_jsonl(PROMPTS / "dropped.jsonl")) == [
        {"file": "a.jsonl", "line": 1, "split": "train", "reason": "in_heldout"}
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (user("a <|im_end|> b"), "special_token_in_text"),
        (user("word " * 400), "too_long"),
        (user("   "), "empty_prompt"),
        ({"messages": []}, "no_user_turn"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, "no_user_turn"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "non_text_content"),
        ({"messages": ["hello"]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "system", "content": " "}, *user("x")["messages"]]}, "empty_message"),
        ({"messages": 5}, "no_messages"),
        (user("half \ud83d"), "bad_unicode"),
        (user("x", id="\ud83d"), "bad_unicode"),
        (user("x", domain="\ud83d"), "bad_unicode"),
        ({"text": "hello"}, "no_messages"),
        (user("fine"), "duplicate"),
    ],
)
def test_unusable_row_is_dropped_with_its_reason(collect, row, reason):
    manifest = collect({"a.jsonl": [user("fine"), row], "heldout.jsonl": [user("h")]}, max_prompt_tokens=300)
    assert manifest["train"]["dropped"] == {reason: 1}
    assert manifest["train"]["kept"] == 1


def test_a_conversation_that_the_template_refuses_is_dropped(collect):
    template = TARGET / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + template.read_text()
    )
    twice = {"messages": user("a")["messages"] + user("b")["messages"]}
    manifest = collect({"a.jsonl": [twice, user("fine")], "heldout.jsonl": [user("h")]})
    assert (manifest["train"]["kept"], manifest["train"]["dropped"]) == (1, {"refused_by_template": 1})


def test_control_tokens_without_a_name_are_found_too(collect):
    tokenizer = load_tokenizer()
    tokenizer.add_tokens([AddedToken("<|header|>", special=True), AddedToken("<think>", special=False)])
    assert "<|header|>" not in tokenizer.all_special_tokens
    tokenizer.save_pretrained(TARGET)
    manifest = collect({"a.jsonl": [user("a <|header|>"), user("a <think>")], "heldout.jsonl": [user("h")]})
    assert (manifest["train"]["kept"], manifest["train"]["dropped"]) == (1, {"special_token_in_text": 1})


@pytest.mark.parametrize("split", ["test", ["train"]])
def test_an_unknown_split_is_named(collect, split):
    with pytest.raises(DraftlineError, match=r"a\.jsonl:1: split is .*, expected one of train, heldout"):
        collect({"a.jsonl": [user("x", split=split)]})


def test_ids_of_a_large_set_do_not_collide(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", (user(str(n)) for n in COLLIDING_IN_32_BITS))
    assert len({row.prompt.id for row in read_folder(tmp_path)}) == 2


def test_target_writes_the_answer_that_the_data_set_holds(collect):
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "an answer of another model"}]},
        {"prompt": "plain"},
    ]
    collect({"a.jsonl": rows, "heldout.jsonl": [user("h")]})
    assert [p.messages for p in read_prompts("train")] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "plain"}],
    ]


def test_lines_end_at_newlines_only_and_blank_ones_are_skipped(collect):
    data = "\ufeff" + json.dumps(user("one\u2028two"), ensure_ascii=False) + "\r\n\n" + json.dumps(user("three"))
    manifest = collect({"a.jsonl": data.encode(), "heldout.jsonl": [user("h")]})
    assert manifest["train"]["prompts"] == 2


def test_broken_line_is_named(collect):
    with pytest.raises(DraftlineError, match=r"a\.jsonl:2: not valid JSON"):
        collect({"a.jsonl": b'{"prompt": "x"}\n{"prompt": "tru', "heldout.jsonl": [user("h")]})


def test_a_missing_split_says_how_to_make_one(collect):
    with pytest.raises(DraftlineError, match="gives no heldout prompt"):
        collect({"a.jsonl": [user("x")]})


def test_a_limit_takes_from_every_domain_in_turn(collect):
    rows = [user(f"{domain} {n}", domain=domain) for domain in ("maths", "code") for n in range(5)]
    manifest = collect({"a.jsonl": rows, "heldout.jsonl": [user("h")]}, max_train=4)
    assert manifest["train"]["domains"] == {"maths": 2, "code": 2}
    assert read_json(PROMPTS / "manifest.json") == manifest


def test_an_edited_prompt_is_another_prompt(collect):
    ids = []
    for text in ("first wording", "second wording"):
        collect({"a.jsonl": [user(text, id="q1")], "heldout.jsonl": [user("h")]})
        ids += [prompt.id for prompt in read_prompts("train")]
    assert len(set(ids)) == 2 and all(identity.startswith("q1-") for identity in ids)


def test_builtin_prompts_are_each_written_once():
    texts = Counter(row["messages"][-1]["content"].casefold() for f in BUILTIN.glob("*.jsonl") for row in read_jsonl(f))
    assert texts.most_common(1)[0][1] == 1
