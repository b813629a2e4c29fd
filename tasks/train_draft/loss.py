"""Soft cross-entropy of test-time training, and what counts as a right prediction (contract, section 4).

Step i at t learns from the target's distribution at s = t + 1 + i. So all steps that learn from one s are taken together:
its distribution is computed once, a chunk of such sources at a time, and the gradient of a chunk is taken while its
logits are there. Neither logits nor distributions are kept, and the backward only scales what is ready (the way of Liger
Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv:2410.10989).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tasks.common.kernels import compiles_on
from tasks.common.packing import PackedSamples, TttInputs
from tasks.common.rows import round_up
from tasks.train_draft.target_head import RestrictedHead

# EAGLE-3: a later step of the chain counts only where the earlier ones were right.
STEP_WEIGHT = 0.8
# Bytes of a chunk's logits and their gradient: on a GPU large enough for its matrix products, on a CPU near its caches.
_CHUNK_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}
# On a GPU chunks have two sizes, so that kernels are compiled for no more: this, where the bytes allow it, and a quarter.
CHUNK_SOURCES = 1024


@dataclass(frozen=True)
class Lessons:
    """What K steps learn from the target, source by source.

    Attributes:
        sources: positions s whose distribution is learnt from, int64 [S].
        labels: draft id of the target's argmax there, int64 [S].
        learners: for each step the place of position s - 1 - i among the K x R outputs of all steps; K x R where there
            is none: int64 [S, K].
        loss_positions: of each step, int64 [K].
        supervised: of each step, those whose target argmax the draft cannot propose included; int64 [K].
    """

    sources: torch.Tensor
    labels: torch.Tensor
    learners: torch.Tensor
    loss_positions: torch.Tensor
    supervised: torch.Tensor

    @classmethod
    def of(
        cls, samples: PackedSamples, inputs: TttInputs, labels: torch.Tensor, device: torch.device | str
    ) -> "Lessons":
        """For samples on the CPU, in the form that `device` computes.

        Args:
            labels: draft id of the target's argmax at each position, -1 where it has none; int64 [T].
        """
        num_steps, num_rows = inputs.read_ids.shape
        wanted = samples.supervised(-1) & (samples.positions > 0)  # some t <= s - 1 in the sample predicts x_{s+1}
        sources = (wanted & (labels >= 0)).nonzero().squeeze(1)
        steps = torch.arange(num_steps)
        learns = samples.positions[sources, None] > steps
        row_at = torch.zeros(samples.num_tokens, dtype=torch.int64)
        row_at[inputs.rows.index[: inputs.rows.count]] = torch.arange(inputs.rows.count)
        places = row_at[(sources[:, None] - 1 - steps).clamp(min=0)] + steps * num_rows
        learners = torch.where(learns, places, num_steps * num_rows)
        supervised = torch.stack([samples.supervised(step).sum() for step in range(num_steps)])
        counts, missing = learns.sum(0), 0
        if compiles_on(device):
            missing = round_up(max(len(sources), 1), CHUNK_SOURCES // 4) - len(sources)
        return cls(
            F.pad(sources, (0, missing)),
            F.pad(labels[sources], (0, missing)),
            F.pad(learners, (0, 0, 0, missing), value=num_steps * num_rows),
            counts,
            supervised,
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Lessons":
        """`function` of every tensor: to a device, into pinned memory."""
        return Lessons(*(function(tensor) for tensor in vars(self).values()))


def soft_cross_entropy(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    step_weights: torch.Tensor,
    lessons: Lessons,
    last: torch.Tensor,
    target: RestrictedHead,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of K steps against the target restricted to the draft vocabulary and renormalised there.

    Args:
        hidden: what the head reads at the rows of all steps, [K * R, H].
        lm_head: [D, H], in the type of the parameters; its gradient is summed in that type.
        step_weights: what the summed loss of each step counts, float32 [K].
        last: the target's stored final states, [T, H].

    Returns:
        scalar with gradient: the steps' sums weighted; without: loss of each step in nats, summed over its loss
        positions, float32 [K]; of those, where the draft's argmax is the target's, int64 [K].
    """
    return _SoftCrossEntropy.apply(hidden, lm_head, step_weights, lessons, last, target)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, step_weights, lessons: Lessons, last, target: RestrictedHead):
        num_steps, nowhere = len(step_weights), len(hidden)
        head = lm_head.to(hidden.dtype)
        totals = torch.zeros(num_steps, device=hidden.device)
        right = torch.zeros(num_steps, dtype=torch.int64, device=hidden.device)
        learning = ctx.needs_input_grad[0]
        if learning:
            d_hidden = hidden.new_zeros(nowhere + 1, hidden.shape[1])
            d_head = torch.zeros_like(lm_head)
        for chunk in _chunks(len(lessons.sources), num_steps * len(head) * head.element_size(), hidden.device):
            learners = lessons.learners[chunk].flatten()
            x = hidden.index_select(0, learners.clamp(max=nowhere - 1))
            logits = F.linear(x, head).view(-1, num_steps, len(head))
            wanted = target.logits(last.index_select(0, lessons.sources[chunk]))
            counts = (learners < nowhere).view(-1, num_steps)
            losses, correct, d_logits = of_chunk(logits, wanted, lessons.labels[chunk], counts * step_weights, learning)
            totals += torch.where(counts, losses, 0).sum(0)
            right += (correct & counts).sum(0)
            if learning:
                d_logits = d_logits.view(-1, len(head))
                d_hidden.index_copy_(0, learners, d_logits @ head)
                _add_product(d_head, d_logits.T, x)
        if learning:
            ctx.gradients = d_hidden[:nowhere], d_head
        ctx.mark_non_differentiable(totals, right)
        return (totals * step_weights).sum(), totals, right

    @staticmethod
    def backward(ctx, d_loss, _totals, _right):
        d_hidden, d_head = ctx.gradients
        del ctx.gradients  # scaled in place, once
        return d_hidden.mul_(d_loss), d_head.mul_(d_loss), None, None, None, None


def of_chunk(
    logits: torch.Tensor, wanted: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, learning: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Losses and hits of c sources, float32 and bool [c, K], and with `learning` the gradient of the weighted losses.

    Args:
        logits: the draft's, [c, K, D]; the gradient may be written over them.
        wanted: the target's, [c, D].
        labels: of the target's argmax, int64 [c].
        weights: of each loss, float32 [c, K].
    """
    if logits.is_cuda:
        from tasks.train_draft import loss_kernel  # Triton, which a CPU needs not have

        return loss_kernel.of_chunk(logits, wanted, labels, weights, learning)
    z = logits.float()
    shares = wanted.float().softmax(-1)[:, None]
    log_sum = z.logsumexp(-1)
    losses = log_sum - (shares * z).sum(-1)
    correct = z.argmax(-1) == labels[:, None]
    if not learning:
        return losses, correct, None
    d_logits = (z - log_sum[..., None]).exp_().sub_(shares).mul_(weights[..., None])
    return losses, correct, d_logits.to(logits.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to a float32 total; on a GPU a product of shorter numbers is not rounded to their type first."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _chunks(num_sources: int, bytes_per_source: int, device: torch.device) -> Iterator[slice]:
    """Slices of the sources whose logits and gradients are within the budget of bytes."""
    most = _CHUNK_BYTES[device.type] // (2 * bytes_per_source)
    sizes = [max(1, most)]
    if compiles_on(device):
        small = CHUNK_SOURCES // 4
        sizes = [max(small, min(CHUNK_SOURCES, most // small * small)), small]
    start = 0
    while start < num_sources:
        size = next((size for size in sizes if start + size <= num_sources), num_sources - start)
        yield slice(start, start + size)
        start += size
