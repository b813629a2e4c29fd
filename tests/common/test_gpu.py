"""Reading nvidia-smi, whose place a script takes: these tests run where there is no GPU."""

import pytest

from tasks.common import gpu


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`driver(query, lines)`: an nvidia-smi that answers this query with these lines."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(query: str, *lines: str) -> None:
        script = tmp_path / "nvidia-smi"
        answers = "\n".join(f"echo '{line}'" for line in lines)
        script.write_text(f'#!/bin/sh\ncase "$1" in --query-{query}) {answers or ":"} ;; *) exit 2 ;; esac\n')
        script.chmod(0o755)

    return install


def test_memory_in_use_by_gpu(driver):
    driver("gpu=index,memory.used", "0, 4", "1, 71234")
    assert gpu.memory_used_mib() == {0: 4, 1: 71234}


def test_gpus_whose_memory_the_driver_hides_are_left_out(driver):
    driver("gpu=index,memory.used", "0, [N/A]", "1, 71234")
    assert gpu.memory_used_mib() == {1: 71234}


def test_processes_whose_memory_the_driver_hides_are_left_out(driver):
    driver("compute-apps=pid,used_memory", "812, 512", "813, [N/A]", "[N/A], 64")
    assert gpu.processes() == {812: 512}


def test_a_machine_without_the_driver_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.memory_used_mib() == {}
    assert gpu.processes() == {}


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, {1, 2}), ("4,5,6", {5, 6}), ("4,5", {5}), ("GPU-ab,GPU-cd,GPU-ef", None)]
)
def test_indices_of_a_process_in_the_drivers_count(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.physical(range(1, 3)) == expected
