"""Checks of Python, torch, GPUs and SGLang."""

import os
import stat

import pytest

from tasks.common.params import Params
from tasks.verify_environment.checks.runtime import (
    check_attention,
    check_driver,
    check_gpus,
    check_kernels,
    check_platform,
    check_python,
    check_server_flags,
    check_sglang,
    check_torch,
)
from tasks.verify_environment.facts import Compute, Engine, Gpus, Import
from tasks.verify_environment.machine import find_gpus
from tasks.verify_environment.verify import attention_choice

ON_CPU = Params()
ON_GPU = Params.model_validate({"target": {"device": "cuda", "dtype": "bfloat16"}})


def on_gpu(**serve) -> Params:
    return Params.model_validate({"target": {"device": "cuda", "dtype": "bfloat16"}, "serve": serve})


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an `nvidia-smi` on PATH that answers the two queries with these rows."""

    def plant(gpus: list[str], processes: list[str] = ()) -> Gpus:
        lines = {"*--query-gpu=*": gpus, "*--query-compute-apps=*": processes}
        cases = "".join(f"{pattern}) printf '%s\\n' {' '.join(map(repr, rows))};;\n" for pattern, rows in lines.items())
        script = tmp_path / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return find_gpus()

    return plant


def h200(index: int, used: int | str) -> str:
    return f"{index}, GPU-{index}, 143771, {used}, 580.95.05, NVIDIA H200"


def imported(version="0.5.23", **errors: str) -> Engine:
    """An engine all of whose imports worked but for those of these roles."""
    roles = ("engine", "kernels", "attention", "model")
    return Engine(
        version=version,
        imports=tuple(Import(role=role, module=f"{role}.module", error=errors.get(role)) for role in roles),
    )


def test_nothing_but_linux_is_an_error():
    assert check_platform().verdict == "ok"
    check = check_platform("darwin")
    assert (check.verdict, check.found) == ("error", "darwin")
    assert "on Linux" in check.fix


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 14), "error"), ((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 14, 0), "error")]
)
def test_python_from_3_11_to_3_13(version, verdict):
    assert check_python(version).verdict == verdict


def test_a_cpu_build_of_torch_cannot_serve_a_cuda_target():
    compute = Compute(torch="2.13.0+cpu", device_error="AssertionError: Torch not compiled with CUDA enabled")
    check = check_torch(ON_GPU, compute)
    assert check.verdict == "error"
    assert "CUDA build" in check.fix
    assert "not compiled with CUDA" in check.found


def test_a_gpu_that_does_not_exist_is_an_error_that_names_those_that_do():
    params = Params.model_validate({"target": {"device": "cuda:9"}})
    compute = Compute(torch="2.11.0", cuda_build="13.0", devices=8, device_error="RuntimeError: invalid device ordinal")
    assert "cuda:0 to cuda:7" in check_torch(params, compute).fix


def test_gpu_memory_in_use_is_listed_by_gpu(nvidia_smi):
    gpus = nvidia_smi([h200(0, 0), h200(1, 0), h200(2, 7), h200(3, 0)])
    check = check_gpus(ON_GPU, gpus)
    assert check.verdict == "ok"
    assert check.found == "4 x NVIDIA H200, in use 0, 0, 7, 0 MiB"


def test_a_busy_gpu_is_a_warning_that_names_the_process(nvidia_smi):
    gpus = nvidia_smi([h200(0, 7), h200(1, 90210)], ["GPU-1, 4711, 90200, /usr/bin/python3"])
    check = check_gpus(ON_GPU, gpus)
    assert check.verdict == "warning"
    assert "in use 7, 90210 MiB: pid 4711 /usr/bin/python3 (90200 MiB on GPU 1)" in check.found


def test_a_busy_gpu_whose_process_is_hidden_is_a_warning_too(nvidia_smi):
    check = check_gpus(ON_GPU, nvidia_smi([h200(0, 90210)]))
    assert check.verdict == "warning"
    assert "cannot be seen" in check.found


def test_a_gpu_whose_memory_is_hidden_is_left_out(nvidia_smi):
    gpus = nvidia_smi([h200(0, 7), h200(1, "[N/A]")], ["GPU-0, [N/A], 5, python", "GPU-1, 4711, [N/A], python"])
    assert [gpu.index for gpu in gpus.gpus] == [0]
    assert [(process.pid, process.memory_mib) for process in gpus.processes] == [(4711, None)]


def test_only_hidden_gpu_memory_is_a_warning_that_says_so(nvidia_smi):
    gpus = nvidia_smi(["0, GPU-0, [N/A], [N/A], 580.95.05, NVIDIA GB10"])
    assert check_gpus(ON_GPU, gpus).found == "nvidia-smi does not tell the memory of GPU 0"
    assert check_driver(ON_GPU, Compute(cuda_build="13.0", devices=1), gpus).verdict == "ok"


@pytest.mark.parametrize(("build", "verdict"), [("13.0", "ok"), ("12.8", "ok"), (None, "ok")])
def test_a_driver_serves_the_cuda_builds_of_its_age_and_older(nvidia_smi, build, verdict):
    assert check_driver(ON_GPU, Compute(cuda_build=build, devices=1), nvidia_smi([h200(0, 0)])).verdict == verdict


def test_a_driver_that_is_too_old_is_an_error_unless_torch_works_under_it(nvidia_smi):
    gpus = nvidia_smi(["0, GPU-0, 81559, 0, 550.54.15, NVIDIA H100"])
    broken = check_driver(ON_GPU, Compute(cuda_build="13.0", devices=1, device_error="driver too old"), gpus)
    assert (broken.verdict, broken.expected) == ("error", "580.65 or newer, for CUDA 13.0")
    assert check_driver(ON_GPU, Compute(cuda_build="13.0", devices=1), gpus).verdict == "warning"


def test_no_driver_is_an_error_on_cuda_and_no_matter_on_cpu():
    gpus = Gpus(error="no nvidia-smi on PATH")
    assert check_driver(ON_GPU, Compute(cuda_build="13.0"), gpus).verdict == "error"
    assert check_driver(ON_CPU, Compute(), gpus).verdict == "not applicable"
    assert check_gpus(ON_CPU, gpus).verdict == "not applicable"


def test_a_failing_nvidia_smi_is_reported(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "ended with code 9" in find_gpus().error


def test_an_engine_that_does_not_import_is_an_error_with_the_module():
    check = check_sglang(imported(engine="ImportError: no torchvision"))
    assert check.verdict == "error"
    assert check.found == "0.5.23: engine.module: ImportError: no torchvision"


def test_an_engine_version_whose_layer_readings_are_unknown_is_a_warning():
    assert check_sglang(imported("0.6.0")).verdict == "warning"
    assert check_sglang(imported("0.5.16")).verdict == "ok"


def test_missing_kernels_are_an_error_with_a_fix_for_the_device():
    broken = imported(kernels="ModuleNotFoundError: No module named 'sgl_kernel'")
    assert "infra/sglang_cpu" in check_kernels(ON_CPU, broken).fix
    assert "CUDA" in check_kernels(ON_GPU, broken).fix
    assert check_kernels(ON_CPU, imported()).verdict == "ok"


def test_missing_attention_kernels_are_an_error_only_where_a_flag_names_the_backend():
    broken = imported(attention="ImportError: flashinfer")
    assert check_attention(broken, ("flashinfer",), configured=True).verdict == "error"
    assert check_attention(broken, ("flashinfer",), configured=False).verdict == "warning"
    assert check_attention(imported(), ("flashinfer",), configured=True).verdict == "ok"


def test_the_attention_backend_is_the_one_that_the_server_will_get():
    hopper, ampere = Compute(capability=(9, 0)), Compute(capability=(8, 6))
    assert attention_choice(ON_CPU, Compute())[:2] == (("intel_amx",), True)
    assert attention_choice(on_gpu(extra_args=["--attention-backend", "triton"]), hopper)[:2] == (("triton",), True)
    assert attention_choice(ON_GPU, hopper)[:2] == (("fa3",), False)
    assert attention_choice(ON_GPU, ampere)[:2] == (("flashinfer",), False)


def test_flags_that_the_plan_sets_itself_are_refused_here_already():
    _, _, refused = attention_choice(on_gpu(extra_args=["--speculative-algorithm", "EAGLE"]), Compute())
    check = check_server_flags(ON_GPU, refused)
    assert check.verdict == "error"
    assert "--speculative-algorithm" in check.found
