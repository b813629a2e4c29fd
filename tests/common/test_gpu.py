"""Reading nvidia-smi, whose place a script takes: these tests run where there is no GPU."""

import pytest

from tasks.common import gpu
from tasks.common.errors import DraftlineError


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`driver(query, lines)`: an nvidia-smi that answers this query with these lines, and those of earlier calls."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cases = []

    def install(query: str, *lines: str) -> None:
        script = tmp_path / "nvidia-smi"
        answers = "\n".join(f"echo '{line}'" for line in lines)
        cases.append(f"--query-{query}) {answers or ':'} ;;")
        script.write_text(f'#!/bin/sh\ncase "$1" in {" ".join(cases)} *) exit 2 ;; esac\n')
        script.chmod(0o755)

    return install


def test_memory_in_use_by_gpu(driver):
    driver("gpu=index,memory.used", "0, 4", "1, 71234")
    assert gpu.memory_used_mib() == {0: 4, 1: 71234}


def test_gpus_whose_memory_the_driver_hides_are_left_out(driver):
    driver("gpu=index,memory.used", "0, [N/A]", "1, 71234")
    assert gpu.memory_used_mib() == {1: 71234}


def test_processes_are_named_by_gpu_without_those_whose_memory_the_driver_hides(driver):
    driver("gpu=index,uuid", "0, GPU-ab", "1, GPU-cd")
    rows = ("GPU-cd, 812, 512", "GPU-ab, 812, 64", "GPU-cd, 813, [N/A]", "GPU-cd, [N/A], 64", "GPU-ef, 814, 64")
    driver("compute-apps=gpu_uuid,pid,used_memory", *rows)
    assert gpu.holders() == {1: {812: 512}, 0: {812: 64}}


def test_a_machine_without_the_driver_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.memory_used_mib() == {}
    assert gpu.holders() == {}


@pytest.mark.parametrize(
    ("script", "seconds", "why"),
    [
        (
            "echo NVIDIA-SMI has failed because no driver answers; exit 9",
            30,
            "ended with code 9 and said 'NVIDIA-SMI has failed",
        ),
        ("exec sleep 60", 0.3, "timed out after 0.3 seconds"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_sentence(tmp_path, monkeypatch, script, seconds, why):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "_ANSWER_S", seconds)
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(DraftlineError, match=f"^nvidia-smi --query-gpu=index,memory.used: .*{why}.*target.device: cpu"):
        gpu.memory_used_mib()


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, {1, 2}), ("4,5,6", {5, 6}), ("4,5", {5}), ("GPU-ab,GPU-cd,GPU-ef", None)]
)
def test_indices_of_a_process_in_the_drivers_count(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.physical(range(1, 3)) == expected
