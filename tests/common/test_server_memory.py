"""Which servers have room beside each other; how much is free is planted, what SGLang takes of it is its own rule."""

import pytest

from tasks.common.server_memory import fit_together
from tasks.common.server_plan import baseline_plan


@pytest.mark.parametrize(
    ("tokens", "fraction", "free", "fit"),
    [
        (None, 0.3, 11e9, True),  # 2 x (3.3 GB and 2 GB of processes)
        (None, 0.3, 9e9, False),
        (None, 0.5, 1e12, False),
        (20_000, 0.5, 9e9, True),  # of the tiny target next to nothing
        (20_000, 0.5, 4e9, False),
    ],
)
def test_on_a_cpu_too_a_cache_of_no_stated_size_takes_its_share_of_what_is_free(
    project, tiny_params, monkeypatch, tokens, fraction, free, fit
):
    monkeypatch.setattr("tasks.common.server_memory.available_memory", lambda: free)
    serve = {"context_length": 512, "max_total_tokens": tokens, "mem_fraction_static": fraction}
    params = tiny_params(serve=serve)
    assert fit_together([baseline_plan(params)] * 2, params) is fit
