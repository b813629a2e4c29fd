"""The GPU's kernel of the loss against the plain form: on a GPU itself, elsewhere by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.train_draft import loss

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def differences(device: str, dtype: torch.dtype) -> None:
    """Assert that losses, hits and gradient agree; the last entries are of a block that is not whole."""
    from tasks.train_draft import loss_kernel

    generator = torch.Generator().manual_seed(0)
    sources, num_steps, entries = 5, 3, 2 * loss_kernel._BLOCK + 77
    logits = (3 * torch.randn(sources, num_steps, entries, generator=generator)).to(dtype)
    wanted = (3 * torch.randn(sources, entries, generator=generator)).to(dtype)
    weights = torch.rand(sources, num_steps, generator=generator)
    weights[1, 2] = 0  # a step that does not learn from this source
    logits[2, 0, [5, entries - 1, 4000]] = 40.0  # ties below float32: the first counts
    labels = logits[:, 0].float().argmax(-1)
    labels[3] = entries - 1
    expected = loss.of_chunk(logits, wanted, labels, weights, True)
    there = [tensor.to(device) for tensor in (logits, wanted, labels, weights)]
    losses, correct, nothing = loss_kernel.of_chunk(*there, False)
    assert nothing is None and torch.equal(there[0].cpu(), logits)
    learnt = loss_kernel.of_chunk(*there, True)
    assert torch.equal(learnt[0], losses) and torch.equal(learnt[1], correct)
    losses, correct, gradient = (tensor.cpu() for tensor in learnt)
    assert labels[2] == 5 and correct[:, 0].tolist() == [True, True, True, False, True]
    assert torch.equal(correct, expected[1])
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3  # a bfloat16 has 8 bits
    torch.testing.assert_close(gradient, expected[2], rtol=tolerance, atol=1e-8)
    assert not gradient[1, 2].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_gives_what_the_plain_form_gives(dtype):
    if torch.cuda.is_available():
        differences("cuda", getattr(torch, dtype))
        return
    # The interpreter is chosen when the kernel is read: in a process of its own.
    program = f"import torch; from {__name__} import differences; differences('cpu', torch.{dtype}); print('compared')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "compared\n", done.stderr
