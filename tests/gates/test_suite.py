import great_expectations.expectations as gxe
import pandas as pd
import pytest

from tasks.gates.suite import Table, because, judge

SENTENCE = "Norms are positive"


def positive(**options) -> gxe.Expectation:
    return gxe.ExpectColumnValuesToBeBetween(
        column="norm",
        min_value=0,
        description=SENTENCE,
        meta=because("H2", "why", "fix"),
        **{"severity": "critical", **options},
    )


def findings(frame: pd.DataFrame, *expectations: gxe.Expectation):
    (judgement,) = judge([Table("samples", "sample", frame, list(expectations))])
    return {finding.sentence: finding for finding in judgement.findings}


def norms(*values) -> pd.DataFrame:
    return pd.DataFrame({"id": [f"s{n}" for n in range(len(values))], "norm": values})


def test_a_breach_names_its_samples_and_what_was_found():
    finding = findings(norms(1.0, -2.5, 3.0), positive())[SENTENCE]
    assert finding.outcome == "failed"
    assert finding.samples == [{"id": "s1", "found": "norm -2.5"}]


def test_twenty_samples_are_named_and_all_are_counted():
    finding = findings(norms(*[-1.0] * 50), positive())[SENTENCE]
    assert (len(finding.samples), finding.unexpected) == (20, 50)


def test_an_empty_table_does_not_pass():
    found = findings(norms(), positive())
    assert found["There is at least one sample"].outcome == "failed"


def test_a_missing_value_does_not_pass_and_is_named():
    finding = findings(norms(1.0, float("nan")), positive())["No sample lacks a value that is judged here"]
    assert finding.outcome == "failed"
    assert finding.samples == [{"id": "s1", "found": "missing norm"}]


def test_a_missing_column_is_a_broken_table_and_not_bad_data():
    found = findings(pd.DataFrame({"id": ["s0"], "size": [1]}), positive())
    assert found[SENTENCE].outcome == "broken"
    assert '"norm"' in found[SENTENCE].observed
    assert "id, size" in found[SENTENCE].fix
    assert "failed" not in {finding.outcome for finding in found.values()}


def test_values_that_cannot_be_compared_are_a_broken_table():
    assert findings(norms("a", "b"), positive())[SENTENCE].outcome == "broken"


def test_a_warning_is_no_failure():
    assert findings(norms(-1.0), positive(severity="warning"))[SENTENCE].outcome == "warned"


def test_an_allowed_share_passes_and_still_names_them():
    finding = findings(norms(1.0, 1.0, 1.0, -1.0), positive(mostly=0.7))[SENTENCE]
    assert finding.outcome == "passed"
    assert (finding.expected, finding.observed) == ("≥ 0 in at least 70 % of the samples", "met by 3 of 4 samples")
    assert finding.samples == [{"id": "s3", "found": "norm -1"}]


def test_more_than_the_allowed_share_is_not_met_by_so_many():
    finding = findings(norms(1.0, -1.0, -1.0, -1.0), positive(mostly=0.7))[SENTENCE]
    assert (finding.outcome, finding.observed) == ("failed", "not met by 3 of 4 samples")


@pytest.mark.parametrize(
    ("options", "expected"), [({}, "≥ 0"), ({"max_value": 2}, "0 … 2"), ({"strict_min": True}, "> 0")]
)
def test_limits_are_written_as_people_write_them(options, expected):
    assert findings(norms(1.0), positive(**options))[SENTENCE].expected == expected
