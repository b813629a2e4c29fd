"""Checks of what computes: Python, torch, GPUs, SGLang and its kernels."""

import sys

from tasks.common.check import Check, Expectation
from tasks.common.params import Params
from tasks.verify_environment.facts import Compute, Engine, Gpus

# What the table of layer readings in tasks/common/contract.py was established on.
ENGINE_VERSIONS = ("0.5.16", "0.5.23")
_PYTHON = ((3, 11), (3, 13))
# Oldest driver of each CUDA major version; its minor versions are compatible (NVIDIA, CUDA Compatibility, table 1).
_OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
_BUSY_MIB = 1024


def check_platform(platform: str = sys.platform) -> Check:
    want = Expectation("platform", "linux", "Servers and what is left of them are found through /proc.")
    if platform == "linux":
        return want.ok(platform)
    return want.error(platform, "Run it on Linux: another machine, a container, or WSL 2 on Windows.")


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    want = Expectation("python", "3.11 to 3.13", "torch and SGLang are built for these versions.")
    found = ".".join(map(str, version))
    if _PYTHON[0] <= version[:2] <= _PYTHON[1]:
        return want.ok(found)
    return want.error(found, "Make the environment anew with a Python of 3.11 to 3.13.")


def check_torch(params: Params, compute: Compute) -> Check:
    device = params.target.device
    want = Expectation("torch", f"multiplies on {device}", "The target, the dump and the trainer run in torch.")
    if compute.error:
        return want.error(
            compute.error, "Install torch: CPU as in infra/constraints-cpu.txt, CUDA as pytorch.org says."
        )
    found = f"{compute.torch}, {f'built for CUDA {compute.cuda_build}' if compute.cuda_build else 'built without CUDA'}"
    if not compute.device_error:
        threads = f" on {compute.threads} threads" if device == "cpu" else ""
        return want.ok(f"{found}, {_flops(compute.matmul_flops)} in {params.target.dtype}{threads}")
    if device == "cpu":
        fix = "Set target.dtype: float32."
    elif compute.cuda_build is None:
        fix = "Install torch's CUDA build (pytorch.org), or set target.device: cpu."
    elif compute.devices == 0:
        fix = "See `driver` and `gpus`; look at CUDA_VISIBLE_DEVICES, and whether the container was given its GPUs."
    else:
        fix = (
            f"torch sees {compute.devices} GPUs, cuda:0 to cuda:{compute.devices - 1}: set target.device to a free one."
        )
    return want.error(f"{found}: {compute.device_error}", fix)


def check_driver(params: Params, compute: Compute, gpus: Gpus) -> Check:
    build = compute.cuda_build
    oldest = _OLDEST_DRIVER.get(int(build.split(".")[0])) if build else None
    want = Expectation(
        "driver",
        f"{oldest} or newer, for CUDA {build}" if oldest else "one for torch's CUDA build",
        "An older driver cannot load the kernels of torch's CUDA build.",
    )
    if params.target.device == "cpu":
        return want.not_applicable("target.device is cpu")
    if gpus.driver is None:
        verdict = want.warning if compute.devices else want.error
        return verdict(
            gpus.error or "none", "Install NVIDIA's driver, or start the container with its GPUs (--gpus all)."
        )
    if oldest is None or _numbers(gpus.driver) >= _numbers(oldest):
        return want.ok(gpus.driver)
    # NVIDIA's compatibility package can make a newer build work under an older driver.
    verdict = want.error if compute.device_error else want.warning
    return verdict(gpus.driver, f"Update the driver, or install a torch that is built for a CUDA older than {build}.")


def check_gpus(params: Params, gpus: Gpus) -> Check:
    want = Expectation(
        "gpus", "idle GPUs", "Memory in use is missing for weights and cache; other work slows the benchmark."
    )
    if params.target.device == "cpu":
        return want.not_applicable("target.device is cpu")
    if not gpus.gpus:
        return want.warning(gpus.error or "nvidia-smi lists none", "Run where nvidia-smi lists the GPUs.")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus.gpus))
    found = f"{len(gpus.gpus)} x {names}, in use {', '.join(str(gpu.memory_used_mib) for gpu in gpus.gpus)} MiB"
    busy = [gpu.index for gpu in gpus.gpus if gpu.memory_used_mib > _BUSY_MIB]
    if not busy:
        return want.ok(found)
    holders = [f"pid {p.pid} {p.name} ({p.memory_mib} MiB on GPU {p.gpu})" for p in gpus.processes if p.gpu in busy]
    return want.warning(
        f"{found}: {', '.join(holders) or 'by processes that cannot be seen from here'}",
        f"End what holds GPU {', '.join(map(str, busy))} if it is yours, or choose others with CUDA_VISIBLE_DEVICES.",
    )


def check_sglang(engine: Engine) -> Check:
    want = Expectation(
        "sglang",
        f"imports; layer ids are known to be read as in {' and '.join(ENGINE_VERSIONS)}",
        "The server starts with these imports, in this environment.",
    )
    failed = engine.failed("engine")
    if engine.error or failed:
        found = engine.error or f"{engine.version}: {failed[0].module}: {failed[0].error}"
        return want.error(found, "Install what is missing as infra/constraints-cpu.txt pins it, with pip's --no-deps.")
    if engine.version not in ENGINE_VERSIONS:
        return want.warning(f"{engine.version}", "Install one of these, or wait for launch_server's parity check.")
    return want.ok(f"{engine.version}, imported in {engine.seconds:.0f} s")


def check_kernels(params: Params, engine: Engine) -> Check:
    on_cpu = params.target.device == "cpu"
    want = Expectation(
        "kernels",
        f"sgl_kernel imports{' (the stand-in of infra/sglang_cpu)' if on_cpu else ''}",
        "Without its kernels the server dies while it loads the target.",
    )
    if engine.error:
        return want.not_applicable("see sglang")
    failed = engine.failed("kernels")
    if not failed:
        return want.ok("sgl_kernel imports")
    fix = "Install the kernel wheel that SGLang's metadata names, for your CUDA version."
    return want.error(f"{failed[0].error}", "Restore infra/sglang_cpu from the repository." if on_cpu else fix)


def check_server_flags(params: Params, refused: str | None) -> Check:
    """
    Args:
        refused: why the server plan takes no such flags.
    """
    want = Expectation(
        "server_flags", "serve.extra_args that the plan does not set itself", "What is set twice cannot be checked."
    )
    if refused:
        return want.error(refused, "Correct serve.extra_args.")
    return want.ok(" ".join(params.serve.extra_args) or "no more than the plan's")


def check_attention(engine: Engine, backends: tuple[str, ...], configured: bool) -> Check:
    """
    Args:
        configured: whether flags name the backends; else they are what SGLang is likely to choose here.
    """
    want = Expectation(
        "attention",
        f"{', '.join(backends)} import ({'configured' if configured else 'what SGLang is likely to choose here'})",
        "Attention kernels are imported only when the server has loaded its weights.",
    )
    if engine.is_broken or not backends:
        return want.not_applicable("see sglang" if engine.is_broken else "see server_flags")
    failed = engine.failed("attention")
    if not failed:
        return want.ok(f"{', '.join(backends)} import")
    verdict = want.error if configured else want.warning
    fix = "Install that package, or name another backend: serve.extra_args: [--attention-backend, triton]."
    return verdict(f"{failed[0].module}: {failed[0].error}", fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _flops(flops: float | None) -> str:
    if flops is None:
        return "matmul not measured"
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"
