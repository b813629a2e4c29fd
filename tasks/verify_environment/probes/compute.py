"""How fast torch is on the configured device: a square matrix product in the configured dtype, and a copy in memory."""

import time
from collections.abc import Callable

from tasks.verify_environment.probes import reason, respond

# Seconds that each measurement repeats for; the fastest repeat counts, since other work on the host only slows.
_SECONDS = 0.2


def find(target: dict) -> dict:
    """`target` holds `device` and `dtype`."""
    import torch

    facts: dict = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "devices": torch.cuda.device_count() if torch.version.cuda else 0,
        "threads": torch.get_num_threads(),
    }
    device, dtype = torch.device(target["device"]), getattr(torch, target["dtype"])
    try:
        if device.type == "cuda":
            facts["matmul_flops"] = _matmul_flops(device, dtype, 8192)
            facts["memory_bytes_per_s"] = _copy_speed(device, 1 << 30)
            facts["capability"] = torch.cuda.get_device_capability(device)
        else:
            # On a busy host the threads of one operation wait for each other, and one thread alone is faster.
            for threads, n in ((facts["threads"], 1024), (1, 512)):
                torch.set_num_threads(threads)
                facts["matmul_flops"] = max(facts.get("matmul_flops", 0), _matmul_flops(device, dtype, n))
                facts["memory_bytes_per_s"] = max(facts.get("memory_bytes_per_s", 0), _copy_speed(device, 1 << 26))
    except (RuntimeError, AssertionError) as error:
        facts["device_error"] = reason(error)
    return facts


def _matmul_flops(device, dtype, n: int) -> float:
    """FLOP/s of a product of two n x n matrices, 2 n^3 FLOPs."""
    import torch

    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: left @ right, device)


def _copy_speed(device, size: int) -> float:
    """Bytes read and written in a second by a copy of `size` bytes, more than caches near the cores hold."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest(lambda: target.copy_(source), device)


def _fastest(work: Callable[[], object], device) -> float:
    import torch

    synchronise = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    work()  # the first call initialises libraries and touches pages
    synchronise()
    best, end = float("inf"), time.monotonic() + _SECONDS
    while time.monotonic() < end or best == float("inf"):
        started = time.perf_counter()
        work()
        synchronise()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    respond(find)
