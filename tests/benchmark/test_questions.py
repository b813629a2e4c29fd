"""Sets of questions by path, in the forms that the field uses."""

import json

import pytest

from tasks.benchmark.questions import loads_of
from tasks.common.conversations import read_file
from tasks.common.errors import DraftlineError

EAGLE = {"question_id": 0, "category": "math", "turns": ["How old is Allen?", "And in ten years?"], "reference": ["36"]}
MESSAGES = {"id": "m", "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


@pytest.fixture
def loads(tiny_params, tmp_path, monkeypatch):
    """`loads(rows, **benchmark)` gives the loads of a set that holds these rows."""
    from tasks.common.target import TARGET
    from tasks.prepare_target.prepare import prepare_target

    monkeypatch.chdir(tmp_path)
    prepare_target(tiny_params().target, TARGET)

    def of(rows, serve=None, **benchmark):
        (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked = {"sets": {"maths": "set.jsonl"}, "num_prompts": 3} | benchmark
        return loads_of(tiny_params(benchmark=asked, serve=serve or {"context_length": 256}))

    return of


def test_the_first_turn_of_an_eagle_question_is_asked(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps(EAGLE) + "\n" + json.dumps(MESSAGES) + "\n")
    first, second = read_file(path, "set")
    assert first.prompt.messages == [{"role": "user", "content": "How old is Allen?"}]
    assert first.prompt.domain == "math" and first.prompt.id.startswith("0-")
    assert second.prompt.messages == [{"role": "user", "content": "Hello"}]


def test_every_concurrency_greedily_and_sampling_at_the_lowest_alone(loads):
    found = loads([EAGLE, MESSAGES], concurrency=(1, 2), temperatures=(0, 1))
    assert [(load.concurrency, load.temperature, len(load.questions)) for load in found] == [
        (1, 0, 4),
        (2, 0, 8),
        (1, 1, 4),
    ]
    assert {load.name for load in found} == {"maths"}
    assert found[0].questions[0].token_ids == found[0].questions[2].token_ids  # two questions, asked over again


def test_a_row_that_asks_nothing_is_named_with_its_line(loads):
    with pytest.raises(DraftlineError, match=r"set\.jsonl:2: no question: empty_prompt.*benchmark\.sets\.maths"):
        loads([EAGLE, {"turns": [" "]}])


def test_a_set_without_questions_or_without_a_file_is_named(loads):
    with pytest.raises(DraftlineError, match=r"set\.jsonl: holds no question"):
        loads([])
    with pytest.raises(DraftlineError, match=r"absent\.jsonl: not there"):
        loads([EAGLE], sets={"maths": "absent.jsonl"})


def test_a_question_that_the_served_context_cannot_hold_is_refused_before_a_server_starts(loads):
    with pytest.raises(DraftlineError, match=r"SGLang would refuse it\. Raise serve\.context_length"):
        loads([EAGLE], serve={"context_length": 64})
