"""What the terminal says of a benchmark, from planted figures."""

import pytest

from tasks.benchmark.show import show
from tests.benchmark.planted_report import planted_report


@pytest.fixture
def said(capsys):
    """Lines that a report prints."""

    def lines(report):
        show(report)
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_hundred_columns_hold_every_line_whole(said):
    lines = said(
        planted_report(
            sets=("mt_bench", "humaneval", "a-very-long-name-of-a-set-of-questions"),
            drafts=("a-draft-with-a-long-name",),
        )
    )
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if "…" in line and "a-very-long-n…" not in line]


def test_every_cell_is_a_line_with_what_it_needs_beside_what_it_has(said):
    report = planted_report(concurrency=(1, 64), drafts=("theirs",))
    lines = [" ".join(line.split()) for line in said(report)]
    assert "all sets 64 0 2.32 2.73 13,257 15,610 0.85 (0.81-0.89) 4.83 | 4.10" in lines
    assert sum(" | " in line for line in lines) == len(report["cells"]) + 3  # the headings of two tables, and the words
    assert "Draft theirs" in lines
    assert any(line.startswith("AL: acceptance length; needs: that from which on the draft pays") for line in lines)


def test_one_prompt_is_one_prompt(said):
    report = planted_report()
    report["by_domain"][0]["prompts"] = 1
    assert any(line.endswith(", 1 prompt") for line in map(str.rstrip, said(report)))


def test_advice_comes_last(said):
    report = planted_report() | {"advice": ["2 draft steps [instead of 3] would do."]}
    assert said(report)[-1].strip() == "2 draft steps [instead of 3] would do."


def test_text_that_differs_is_shouted_with_the_place(said):
    report = planted_report() | {
        "lossless": False,
        "first_difference": {"prompt": "[/]17", "position": 31, "baseline": [412], "speculative": [5]},
        "agreement": {"answers": 0.9861, "tokens": 0.9973},
    }
    assert "NO: 99 % of answers are the same; first difference in prompt [/]17, token 31" in "\n".join(said(report))


def test_a_prediction_that_cannot_be_compared_is_not_shown(said):
    assert "predicted" not in "\n".join(said(planted_report() | {"predicted_accept_length": None}))
