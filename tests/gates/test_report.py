import re
import shutil

import great_expectations.expectations as gxe
import pandas as pd
import pytest

from tasks.common.errors import DraftlineError
from tasks.gates.gate import Gate, run_gate
from tasks.gates.report import GATES, Histogram
from tasks.gates.suite import Table, because


def gate(*norms: float, name: str = "s", mostly: float = 1.0) -> Gate:
    expectation = gxe.ExpectColumnValuesToBeBetween(
        column="norm",
        min_value=0,
        mostly=mostly,
        severity="critical",
        description="Norms are positive",
        meta=because("H2", "Zeros teach nothing.", "Dump again."),
    )
    frame = pd.DataFrame({"id": [f"{name}{n}" for n in range(len(norms))], "norm": norms})
    return Gate(
        [Table("samples", "sample", frame, [expectation], shown=("id", "norm"))],
        {"samples": 1},
        [Histogram("Norm", [1.0, 2.0, float("nan")]), Histogram("Empty", []), Histogram("Log", [0.0, 1e3], log=True)],
    )


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_both_files_are_written_before_a_breach_stops_the_chain(tracker):
    with pytest.raises(DraftlineError) as error:
        run_gate("demo", "lead", lambda: gate(-1.0), tracker)
    for part in ("gate demo", "1 of 3 expectations", "Norms are positive", "s0: norm -1", "Dump again."):
        assert part in str(error.value)
    assert "Not met: Norms are positive" in (GATES / "demo.html").read_text()
    assert '"passed": false' in (GATES / "demo.json").read_text()


def test_an_input_that_cannot_be_read_leaves_a_report_too(tracker):
    def unreadable() -> Gate:
        raise DraftlineError("prompts.jsonl:7: not valid JSON")

    with pytest.raises(DraftlineError, match=r"nothing was judged.\nprompts.jsonl:7"):
        run_gate("demo", "lead", unreadable, tracker)
    assert "prompts.jsonl:7" in (GATES / "demo.html").read_text()
    assert '"passed": false' in (GATES / "demo.json").read_text()


def test_a_gate_that_cannot_leave_its_verdict_says_so_before_it_reads_anything(tracker):
    def read() -> Gate:
        raise AssertionError

    (GATES / "demo.json").mkdir(parents=True)
    with pytest.raises(DraftlineError, match=r"^reports/gates/demo\.json: cannot be removed: Is a directory\.$"):
        run_gate("demo", "lead", read, tracker)
    shutil.rmtree(GATES)
    GATES.touch()
    with pytest.raises(DraftlineError, match=r"^reports/gates: cannot be written: File exists\.$"):
        run_gate("demo", "lead", read, tracker)


def test_the_page_needs_nothing_from_elsewhere(tracker):
    run_gate("demo", "lead", lambda: gate(1.0), tracker)
    page = (GATES / "demo.html").read_text()
    assert not re.findall(r"https?://|src=|@import|url\(|<script|<link", page)


def test_text_of_samples_is_not_markup(tracker):
    with pytest.raises(DraftlineError):
        run_gate("demo", "lead", lambda: gate(-1.0, name="<script>alert(1)</script>"), tracker)
    assert "<script" not in (GATES / "demo.html").read_text()


def test_the_same_data_give_the_same_bytes(tracker):
    written = []
    for _ in range(2):
        run_gate("demo", "lead", lambda: gate(1.0), tracker)
        written.append([(GATES / f"demo.{kind}").read_bytes() for kind in ("json", "html")])
    assert written[0] == written[1]


def test_a_gate_that_passed_says_nowhere_that_something_is_not_met(tracker, capsys):
    """The exceptions that a share allows are counted and named all the same."""
    run_gate("demo", "lead", lambda: gate(-1.0, 1.0, 1.0, mostly=0.5), tracker)
    page = (GATES / "demo.html").read_text()
    for part in (
        "met by 2 of 3 samples",
        "in at least 50 % of the samples",
        "Exceptions within the limit:",
        "s0",
    ):
        assert part in page
    assert "not met" not in (page + (GATES / "demo.json").read_text() + capsys.readouterr().out).lower()
