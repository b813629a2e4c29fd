"""The least that a training step must do, and how fast this machine does it: operations and bytes over measured ceilings.

Products of matrices are timed one by one at the shapes that a step has, forward and both of its gradients. What is not a
product is counted in bytes that no way of computing avoids: states read once, parameters and the optimiser's moments read
and written once, each logit read once and its gradient written once.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from infra.gpu.training_sizes import Size
from tasks.train_draft.loss import CHUNK_SOURCES

_SECONDS = 0.15  # for each ceiling


def floor(size: Size, ttt_length: int, device: str) -> dict[str, Any]:
    """Milliseconds of each part, their sum, and the ceilings behind them."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    products, ms, flops, best = {}, 0.0, 0.0, 0.0
    for name, (m, n, k), times, kinds in _products(size, ttt_length):
        seconds, operations = _product(m, n, k, kinds, device, dtype)
        products[name] = {
            "shape": [m, n, k],
            "times": round(times, 2),
            "tflops": round(operations / seconds / 1e12, 1),
            "ms": round(1e3 * seconds * times, 3),
        }
        ms += 1e3 * seconds * times
        flops += operations * times
        best = max(best, operations / seconds)
    bandwidth = _bandwidth(device)
    attention = ttt_length * size.per_step * size.length**2 / 2 * size.heads * size.head_dim * 4 * 3.5
    parameters = sum(n * k for name, (_, n, k), *_ in _products(size, ttt_length) if not name.startswith("target"))
    nbytes = {
        "states": 2 * size.step_tokens * (size.num_aux + 1) * size.hidden,
        "logits": 2 * 2 * _pairs(size, ttt_length) * size.draft_vocab,
        "optimizer": 32 * parameters,  # gradient w+r, parameter r+w, two moments r+w, float32
    }
    parts = {"products": ms, "attention": 1e3 * attention / best}
    parts |= {name: 1e3 * count / bandwidth for name, count in nbytes.items()}
    return {
        "floor_ms": round(sum(parts.values()), 3),
        "parts_ms": {name: round(value, 3) for name, value in parts.items()},
        "tflop": round((flops + attention) / 1e12, 3),
        "gigabytes": {name: round(count / 1e9, 3) for name, count in nbytes.items()},
        "bandwidth_gb_s": round(bandwidth / 1e9),
        "products": products,
    }


def _pairs(size: Size, ttt_length: int) -> int:
    return sum(size.per_step * (size.length - 2 - step) for step in range(ttt_length))


def _products(size: Size, ttt_length: int) -> Iterator[tuple[str, tuple[int, int, int], float, int]]:
    """Name, (rows, outputs, inputs), how many times a step has it; 1: no gradient, 2: of the weight, 3: of the input too."""
    hidden, tokens, rows = size.hidden, size.step_tokens, size.per_step * (size.length - 2)
    heads, kv = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    yield "fc", (tokens, hidden, size.num_aux * hidden), 1, 2
    yield "q", (rows, heads, 2 * hidden), ttt_length, 3
    yield "k and v", (rows, kv, 2 * hidden), ttt_length, 3
    yield "o", (rows, hidden, heads), ttt_length, 3
    yield "gate and up", (rows, 2 * size.intermediate, hidden), ttt_length, 3
    yield "down", (rows, hidden, size.intermediate), ttt_length, 3
    chunk = min(rows, CHUNK_SOURCES)
    pairs = chunk * ttt_length
    yield "head", (pairs, size.draft_vocab, hidden), _pairs(size, ttt_length) / pairs, 3
    yield "target head", (chunk, size.draft_vocab, hidden), rows / chunk, 1


def _product(m: int, n: int, k: int, kinds: int, device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds and operations of y = x w^T with its gradients."""
    x, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, k), (n, k)))
    dy = torch.randn(m, n, device=device, dtype=dtype)
    runs = [lambda: x @ w.T, lambda: dy.T @ x, lambda: dy @ w][:kinds]
    return sum(seconds(run, device) for run in runs), 2.0 * m * n * k * len(runs)


def _bandwidth(device: str) -> float:
    """Bytes read and written in a second by a copy."""
    count = 1 << (28 if device != "cpu" else 24)
    source, target = (torch.zeros(count, device=device) for _ in range(2))
    return 8 * count / seconds(lambda: target.copy_(source), device)


def seconds(run: Callable[[], object], device: str) -> float:
    """Of one run, the mean over many that follow each other without a wait, after some to warm up."""

    def mean(count: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        return (time.perf_counter() - began) / count

    mean(3)
    return mean(max(5, int(_SECONDS / mean(5))))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
