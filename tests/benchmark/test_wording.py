"""How figures of a benchmark are written for people."""

import pytest

from tasks.benchmark.wording import percent


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, "100 %"), (0.0, "0 %"), (0.9861, "99 %"), (0.9961, "99.6 %"), (0.9997, "99.97 %"), (0.0003, "0.03 %")],
)
def test_only_a_whole_share_reads_100_percent_and_only_none_at_all_0(share, said):
    assert percent(share) == said
