"""Losses and gradients of a training step against the float64 reference, on the path of a CPU and on that of a GPU."""

import random

import pytest
import torch

from tasks.common import kernels
from tasks.train_draft import loss
from tasks.train_draft.step import TrainStep
from tests.reference import (
    VOCAB,
    RandomTarget,
    Reference,
    make_batch,
    make_draft,
    make_map,
    on_the_path_of_a_gpu,
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
        on_the_path_of_a_gpu(monkeypatch)


def random_masks(generator: random.Random, count: int) -> list[list[int]]:
    """Turns of random lengths, some of them empty; a sample may begin with an answer."""
    masks = []
    for _ in range(count):
        mask = []
        for _ in range(generator.randint(1, 3)):
            mask += [0] * generator.randint(0, 6) + [1] * generator.randint(0, 9)
        masks.append(mask + [generator.randint(0, 1) for _ in range(3)])
    return masks


def compare(seed: int, case: dict, tolerance: float, batch_tokens: int, device: str, dtype: torch.dtype) -> None:
    """Assert that a step in `dtype` gives what the reference gives, relative to each loss and gradient."""
    torch.manual_seed(seed)
    case = dict(case)
    num_steps, target = case.pop("num_steps"), RandomTarget(case.pop("last_is_normed", True))
    draft = make_draft(**case)
    vocab_map = make_map(draft.config.draft_vocab_size)
    masks = random_masks(random.Random(seed), 4)
    samples = [sample_of(str(i), mask, draft.config.num_aux, draft.config.aux_size) for i, mask in enumerate(masks)]
    reference = Reference(draft)
    expected = reference_sums(reference, samples, target, vocab_map, num_steps)
    expected.weighted.backward()

    step = TrainStep(draft.to(device), own_head(target, vocab_map, dtype, device))
    batch = make_batch(samples, num_steps, target, vocab_map, batch_tokens, dtype, device)
    found, sums = step(batch)
    assert sum(expected.loss_positions) > 0
    torch.testing.assert_close(found.cpu().double(), expected.weighted.detach(), rtol=tolerance, atol=0)
    expected_loss = torch.stack(expected.loss).detach()
    torch.testing.assert_close(sums.loss.cpu().double(), expected_loss, rtol=tolerance, atol=tolerance)
    exact = ("correct",) if dtype == torch.float32 else ()  # rounded logits have other largest ones
    for name in ("loss_positions", "supervised", *exact):
        assert getattr(sums, name).tolist() == getattr(expected, name), name
    for name, parameter in draft.named_parameters():
        gradient = reference.w[name].grad
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.cpu().double() - gradient).norm() / gradient.norm()
        assert error < tolerance, name


@pytest.mark.parametrize("path", ["by sample", "tiles"], indirect=True)
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 1 << 12])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_equals_the_reference_in_losses_and_gradients(path, number, chunk_bytes, monkeypatch):
    monkeypatch.setitem(loss._CHUNK_BYTES, "cpu", chunk_bytes)
    compare(number, CASES[number], 1e-5, 48, "cpu", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("number", [1, 5])
def test_what_a_gpu_compiles_equals_the_reference(number, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_SOURCES", 64)  # several chunks
    compare(number, CASES[number] | {"head_dim": 16}, tolerance, 128, "cuda", dtype)


@pytest.mark.parametrize("path", ["tiles"], indirect=True)
def test_proposals_on_the_path_of_a_gpu_are_those_of_a_cpu(path, monkeypatch):
    torch.manual_seed(0)
    draft, vocab_map = make_draft(), make_map()
    samples = [sample_of(str(i), mask) for i, mask in enumerate(random_masks(random.Random(0), 4))]
    index = torch.tensor([2, 3, 7, 20, 21])
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(kernels, "COMPILED_ON", set())
        batch = make_batch(samples, 3, batch_tokens=48)
        found.append(draft.propose(batch.samples, index, 4, vocab_map))
    assert batch.num_tokens == batch.samples.num_tokens
    assert torch.equal(*found) and found[0].shape == (5, 4)


@pytest.mark.parametrize("path", ["by sample", "tiles"], indirect=True)
def test_bfloat16_is_computed_with_and_parameters_and_gradients_stay_float32(path):
    torch.manual_seed(1)
    target, draft, vocab_map = RandomTarget(), make_draft(), make_map()
    samples = [sample_of(str(i), mask) for i, mask in enumerate(random_masks(random.Random(1), 4))]
    exact, _ = TrainStep(draft, own_head(target, vocab_map))(make_batch(samples, 3, target, vocab_map))
    gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    head, batch = (
        own_head(target, vocab_map, torch.bfloat16),
        make_batch(samples, 3, target, vocab_map, 48, torch.bfloat16),
    )
    assert all(output.dtype == torch.bfloat16 for output in draft.unroll(batch.inputs, batch.samples.aux))
    rounded, _ = TrainStep(draft, head)(batch)
    assert rounded.dtype == torch.float32
    assert 0 < abs(rounded - exact) < 0.02 * exact
    for name, parameter in draft.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert (parameter.grad - gradients[name]).norm() < 0.1 * gradients[name].norm(), name
