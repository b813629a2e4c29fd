"""Losses and gradients of a training step against the float64 reference, on the path of a CPU and on that of a GPU."""

import random

import pytest
import torch

from tasks.common import kernels, past_attention
from tasks.train_draft import loss
from tasks.train_draft.step import TrainStep
from tests.reference import (
    VOCAB,
    RandomTarget,
    Reference,
    make_batch,
    make_draft,
    make_map,
    own_head,
    reference_sums,
    sample_of,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = [
    {"num_steps": 1},
    {"num_steps": 3, "heads": 8, "kv_heads": 2, "head_dim": 6},
    {"num_steps": 4, "draft_vocab": VOCAB},
    {"num_steps": 5, "heads": 2, "kv_heads": 2, "head_dim": 8, "rope": LLAMA3},
    {"num_steps": 3, "num_aux": 1, "fc_norm": True},
    {"num_steps": 7, "num_aux": 4, "norm_output": True},
    {"num_steps": 3, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "target_hidden_size": 20},
    {"num_steps": 3, "last_is_normed": False, "draft_vocab": 12},
]


@pytest.fixture
def path(request, monkeypatch):
    """`by sample`, as on a CPU; `tiles`: padded, with flex_attention, as on a GPU, but nothing is compiled."""
    if request.param == "tiles":
        compiled_as_a_gpu_compiles(monkeypatch, lambda function, **_: function)


def compiled_as_a_gpu_compiles(monkeypatch, compiler) -> None:
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    monkeypatch.setattr(torch, "compile", compiler)
    for kernel in all_kernels():
        monkeypatch.setattr(kernel, "_compiled", None)
    # It refuses gradients on a CPU, where its plain form computes them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def all_kernels() -> list[kernels.Kernel]:
    from tasks.common import draft_layer

    named = (vars(module).values() for module in (draft_layer, past_attention, loss))
    return [value for values in named for value in values if isinstance(value, kernels.Kernel)]


def random_masks(generator: random.Random, count: int) -> list[list[int]]:
    """Turns of random lengths, some of them empty; a sample may begin with an answer."""
    masks = []
    for _ in range(count):
        mask = []
        for _ in range(generator.randint(1, 3)):
            mask += [0] * generator.randint(0, 6) + [1] * generator.randint(0, 9)
        masks.append(mask + [generator.randint(0, 1) for _ in range(3)])
    return masks


@pytest.mark.parametrize("path", ["by sample", "tiles"], indirect=True)
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 1 << 12])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_equals_the_reference_in_losses_and_gradients(path, number, chunk_bytes, monkeypatch):
    monkeypatch.setitem(loss._CHUNK_BYTES, "cpu", chunk_bytes)
    torch.manual_seed(number)
    case = dict(CASES[number])
    num_steps, target = case.pop("num_steps"), RandomTarget(case.pop("last_is_normed", True))
    draft = make_draft(**case)
    vocab_map = make_map(draft.config.draft_vocab_size)
    masks = random_masks(random.Random(number), 4)
    samples = [sample_of(str(i), mask, draft.config.num_aux, draft.config.aux_size) for i, mask in enumerate(masks)]
    reference = Reference(draft)
    expected = reference_sums(reference, samples, target, vocab_map, num_steps)
    expected.weighted.backward()

    step = TrainStep(draft, own_head(target, vocab_map))
    found, sums = step(make_batch(samples, num_steps, target, vocab_map, batch_tokens=48))
    assert sum(expected.loss_positions) > 0
    torch.testing.assert_close(found.double(), expected.weighted.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.loss.double(), torch.stack(expected.loss).detach(), rtol=1e-5, atol=1e-5)
    for name in ("loss_positions", "supervised", "correct"):
        assert getattr(sums, name).tolist() == getattr(expected, name), name
    for name, parameter in draft.named_parameters():
        gradient = reference.w[name].grad
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.double() - gradient).norm() / gradient.norm()
        assert error < 1e-5, name
