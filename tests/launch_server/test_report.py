"""reports/launch_server.json is the same for every run over the same inputs."""

import pytest

from tasks.common.params import Params
from tasks.launch_server.report import _bound, served_limit


@pytest.mark.parametrize(("errors", "bound"), [([1.7e-7, 2.4e-7], 1e-5), ([2e-5], 1e-4), ([9.9e-4], 1e-3)])
def test_the_report_bounds_errors_by_powers_of_ten_since_last_digits_vary(errors, bound):
    assert _bound(errors, limit=1e-3) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 1e-4),
        ({"dump": {"storage_dtype": "float8"}}, 0.05),
        ({"target": {"dtype": "bfloat16"}, "dump": {"storage_dtype": "bfloat16"}}, 0.05),
        ({"dump": {"storage_dtype": "float8"}, "gates": {"max_relative_error": 0.01}}, 0.01),
    ],
)
def test_what_the_draft_is_fed_may_differ_from_the_dump_by_what_their_types_cost(settings, limit):
    assert served_limit(Params.model_validate(settings)) == limit
