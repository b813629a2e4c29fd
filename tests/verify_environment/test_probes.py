"""Probes as processes: what they answer when things go right, crash, hang, or are shadowed."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from tasks.verify_environment.facts import Engine, Interpreter
from tasks.verify_environment.probes import run
from tasks.verify_environment.probes.run import Probe, run_probes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def planted(tmp_path):
    """Write modules to a folder that is first on a probe's path; gives the probe's environment."""

    def plant(files: dict[str, str]) -> dict[str, str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return plant


def engine_with(planted, **modules: str) -> dict[str, str]:
    """A miniature sglang and sgl_kernel; `modules` replaces the text of some."""
    texts = {
        "sgl_kernel": "",
        "http_server": "print('a library greets')",
        "scheduler": "",
        "triton_backend": "",
        "llama": "class Base:\n    def set_eagle3_layers_to_capture(self): ...\n\nclass LlamaForCausalLM(Base): ...\n",
        "gemma": "class GemmaForCausalLM: ...\n",
    } | modules
    srt = "sglang/srt"
    return planted(
        {
            "triton/__init__.py": "",
            "sglang/__init__.py": "",
            "sgl_kernel/__init__.py": texts["sgl_kernel"],
            f"{srt}/entrypoints/http_server.py": texts["http_server"],
            f"{srt}/managers/scheduler.py": texts["scheduler"],
            f"{srt}/layers/attention/triton_backend.py": texts["triton_backend"],
            f"{srt}/models/llama.py": texts["llama"],
            f"{srt}/models/gemma.py": texts["gemma"],
        }
    )


def probe_engine(environment, architecture="LlamaForCausalLM", backends=("triton",)) -> Engine:
    probe = Probe("engine", {"backends": backends, "architecture": architecture}, environment)
    return Engine.model_validate(run_probes(probe)["engine"])


def test_an_inherited_capture_hook_is_found(planted):
    engine = probe_engine(engine_with(planted))
    assert engine.error is None
    assert engine.captures is True
    assert not any(entry.error for entry in engine.imports)


def test_a_class_without_the_hook_is_told_from_no_such_class(planted):
    environment = engine_with(planted)
    assert probe_engine(environment, "GemmaForCausalLM").captures is False
    assert probe_engine(environment, "PhiForCausalLM").captures is None


def test_broken_kernels_are_named_with_the_reason(planted):
    broken = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    engine = probe_engine(engine_with(planted, sgl_kernel=broken))
    assert "libcudart.so.13" in engine.failed("kernels")[0].error
    assert not engine.failed("engine")


def test_missing_attention_kernels_leave_the_engine_importable(planted):
    engine = probe_engine(engine_with(planted, triton_backend="import flashinfer_of_another_world"))
    assert "flashinfer_of_another_world" in engine.failed("attention")[0].error
    assert not engine.failed("engine")


def test_a_crash_is_an_answer(planted):
    engine = probe_engine(engine_with(planted, scheduler="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"))
    assert engine.error.startswith("killed by signal 11")


def test_a_hanging_import_is_ended(planted, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TIMEOUT_S", 10)
    hang = f"import time\nopen({str(tmp_path / 'hangs')!r}, 'w').close()\ntime.sleep(600)"
    environment = engine_with(planted, scheduler=hang)
    before = psutil.Process().children()  # of other tests, such as a Prefect server that is still ending
    assert probe_engine(environment).error == "no answer after 10 s"
    assert (tmp_path / "hangs").exists()  # else it was the interpreter that took so long
    assert set(psutil.Process().children()) <= set(before)


def test_the_cause_behind_a_lazy_import_is_shown(planted):
    chained = "try:\n    import no_such_torchvision\nexcept ImportError as e:\n    raise RuntimeError('lazy') from e"
    error = probe_engine(engine_with(planted, scheduler=chained)).failed("engine")[0].error
    assert "lazy" in error
    assert "no_such_torchvision" in error


def test_a_second_copy_on_pythonpath_comes_first(planted, tmp_path):
    environment = planted({"transformers/__init__.py": ""})
    facts = Interpreter.model_validate(run_probes(Probe("interpreter", environment=environment))["interpreter"])
    assert facts.packages["transformers"].locations[0] == str(tmp_path / "transformers")
    assert len(facts.packages["transformers"].locations) == 2
    assert len(facts.packages["torch"].locations) == 1


def test_an_interpreter_that_is_not_there_is_an_answer():
    answer = run_probes(Probe("interpreter", python="no-such-python"))["interpreter"]
    assert answer["error"] == "no-such-python: No such file or directory"


def test_probes_run_at_the_same_time_and_are_told_apart(planted):
    environment = engine_with(planted)
    answers = run_probes(
        Probe("engine", {"backends": [], "architecture": None}, environment),
        Probe("interpreter", python=sys.executable),
    )
    assert "imports" in answers["engine"]
    assert answers["interpreter"]["executable"] == sys.executable


def test_torch_says_why_a_device_cannot_be_used():
    from tasks.verify_environment.probes.compute import find

    facts = find({"device": "cuda:63", "dtype": "float32"})
    assert facts["device_error"]
    assert "matmul_flops" not in facts


def test_a_cpu_multiplies_and_copies():
    from tasks.verify_environment.probes.compute import find

    facts = find({"device": "cpu", "dtype": "float32"})
    assert facts["matmul_flops"] > 1e8
    assert facts["memory_bytes_per_s"] > 1e7
