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


LINES = [
    ('{"turns": [" "]}', "no question: the user's last turn is empty"),
    (
        '{"question": "How old?"}',
        "no question: of messages, conversations, turns, prompt the line has none (it has 'question')",
    ),
    ('{"turns": "How old?"}', "no question: turns is 'How old?', expected a list of texts"),
    ('{"prompt": 7}', "no question: prompt is 7, expected a text"),
    (
        '{"messages": [{"role": "tool", "content": "x"}]}',
        "a turn is said by none of system, user, assistant, human, gpt",
    ),
    ('{"prompt": "How old', "not valid JSON (Unterminated string starting at: column 12)"),
    ('"How old?"', "expected a JSON object, found str"),
]


@pytest.mark.parametrize(("line", "problem"), LINES)
def test_a_line_that_asks_nothing_is_named_with_its_field_and_what_is_accepted(loads, tmp_path, line, problem):
    (tmp_path / "lines.jsonl").write_text(json.dumps(EAGLE) + "\n" + line + "\n")
    with pytest.raises(DraftlineError) as refusal:
        loads([EAGLE], sets={"maths": "lines.jsonl"})
    said = str(refusal.value)
    assert said.startswith("params.yaml: benchmark.sets.maths: lines.jsonl:2: ") and problem in said
    assert '{"turns": ["..."]} or {"prompt": "..."}' in said and "Correct the" in said


def test_a_file_in_another_encoding_is_to_be_saved_as_utf_8(loads, tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(DraftlineError, match=r"sets\.maths: latin\.jsonl:1: not UTF-8 .* Save the file as UTF-8\."):
        loads([EAGLE], sets={"maths": "latin.jsonl"})


def test_a_set_without_questions_or_without_a_file_is_named(loads, tmp_path):
    with pytest.raises(DraftlineError, match=r"benchmark\.sets\.maths: set\.jsonl holds no question\. Expected"):
        loads([])
    with pytest.raises(
        DraftlineError, match=r"benchmark\.sets\.maths: 'absent\.jsonl' is not there\. Expected: a JSONL"
    ) as e:
        loads([EAGLE], sets={"maths": "absent.jsonl"})
    assert "dvc repro" not in str(e.value)  # no stage writes it
    (tmp_path / "folder").mkdir()
    with pytest.raises(DraftlineError, match=r"benchmark\.sets\.maths: 'folder' is a folder\. Expected: a JSONL file"):
        loads([EAGLE], sets={"maths": "folder"})


def test_text_that_would_become_a_control_token_is_refused_with_its_line(loads):
    with pytest.raises(
        DraftlineError, match=r"sets\.maths: set\.jsonl:2: the text '<\|im_end\|>' would become a control"
    ):
        loads([EAGLE, {"prompt": "What is <|im_end|>?"}])


def test_a_question_that_the_served_context_cannot_hold_is_refused_before_a_server_starts(loads):
    with pytest.raises(
        DraftlineError, match=r"sets\.maths: set\.jsonl:1: .*SGLang would refuse it\. Raise serve\.context_"
    ):
        loads([EAGLE], serve={"context_length": 64})
