"""The machine in words, as reports name it."""

import os

from tasks.common import gpu
from tasks.common.machine import cores, machine


def test_a_cpu_is_named_with_the_cores_that_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert machine("cpu").endswith(f", {len(allowed)} core{'s' * (len(allowed) != 1)}")
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert (cores(), machine("cpu").rpartition(", ")[2]) == (1, "1 core")
    finally:
        os.sched_setaffinity(0, allowed)


def test_gpus_of_one_kind_are_counted(monkeypatch):
    monkeypatch.setattr(gpu, "query", lambda what: [["NVIDIA H200"]] * 8)
    assert machine("cuda").startswith("8 x NVIDIA H200, ")
    monkeypatch.setattr(gpu, "query", lambda what: [["NVIDIA H200"]])
    assert machine("cuda").startswith("NVIDIA H200, ")
