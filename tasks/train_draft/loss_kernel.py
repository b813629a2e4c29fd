"""The loss of a chunk in one launch, for GPUs: logits are read twice and written once, and nothing is stored beside them.

torch.compile makes several passes of the same sums and took 1.8 times as long on an H200 (infra/docs/training.md).
"""

import torch
import triton
import triton.language as tl

from tasks.common.kernels import Kernel

# Vocabulary entries of a pass, and warps that share them: the fastest of those tried on an H200 for 16000 entries.
_BLOCK, _WARPS = 2048, 8


def of_chunk(
    logits: torch.Tensor, wanted: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, learning: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `loss.of_chunk`; the gradient is written over `logits`."""
    sources, num_steps, entries = logits.shape
    losses = torch.empty(sources, num_steps, dtype=torch.float32, device=logits.device)
    correct = torch.empty(sources, num_steps, dtype=torch.bool, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the current GPU, whoever's the pointers are
        _of_row[(sources * num_steps,)](
            logits,
            wanted,
            _log_sum(wanted),
            labels,
            weights,
            losses,
            correct,
            entries,
            num_steps,
            learning,
            _BLOCK,
            num_warps=_WARPS,
        )
    return losses, correct, logits if learning else None


@Kernel
def _log_sum(wanted: torch.Tensor) -> torch.Tensor:
    return wanted.float().logsumexp(-1)


@triton.jit
def _of_row(
    logits,
    wanted,
    wanted_log_sum,
    labels,
    weights,
    losses,
    correct,
    entries: tl.constexpr,
    num_steps: tl.constexpr,
    learning: tl.constexpr,
    block: tl.constexpr,
):
    """One program a row of logits, that is a source and a step."""
    place = tl.program_id(0).to(tl.int64)
    source = place // num_steps
    row, target = logits + place * entries, wanted + source * entries
    target_log_sum = tl.load(wanted_log_sum + source)
    lanes = tl.arange(0, block)
    # Each lane keeps the largest of its entries, where it first came, and the sum of exponentials relative to it.
    top = tl.full([block], float("-inf"), tl.float32)
    top_at = tl.zeros([block], tl.int32)
    total = tl.zeros([block], tl.float32)
    dot = tl.zeros([block], tl.float32)
    for start in range(0, entries, block):
        at = start + lanes
        inside = at < entries
        z = tl.load(row + at, mask=inside, other=-1e30).to(tl.float32)  # finite: a difference of infinities is none
        w = tl.load(target + at, mask=inside, other=float("-inf")).to(tl.float32)
        dot += tl.exp(w - target_log_sum) * z
        larger = z > top
        ratio = tl.exp(-tl.abs(z - top))
        total = tl.where(larger, total * ratio + 1.0, total + ratio)
        top_at = tl.where(larger, at, top_at)
        top = tl.where(larger, z, top)
    largest = tl.max(top, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(top - largest), 0)) + largest
    tl.store(losses + place, log_sum - tl.sum(dot, 0))
    first = tl.min(tl.where(top == largest, top_at, entries), 0)
    tl.store(correct + place, first == tl.load(labels + source))
    if learning:
        weight = tl.load(weights + place)
        for start in range(0, entries, block):
            at = start + lanes
            inside = at < entries
            z = tl.load(row + at, mask=inside, other=-1e30).to(tl.float32)
            w = tl.load(target + at, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(z - log_sum) - tl.exp(w - target_log_sum)) * weight
            tl.store(row + at, gradient.to(logits.dtype.element_ty), mask=inside)
