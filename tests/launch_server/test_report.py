"""reports/launch_server.json is the same for every run over the same inputs."""

import pytest

from tasks.launch_server.report import _bound


@pytest.mark.parametrize(("errors", "bound"), [([1.7e-7, 2.4e-7], 1e-5), ([2e-5], 1e-4), ([9.9e-4], 1e-3)])
def test_the_report_bounds_errors_by_powers_of_ten_since_last_digits_vary(errors, bound):
    assert _bound(errors, limit=1e-3) == pytest.approx(bound)
