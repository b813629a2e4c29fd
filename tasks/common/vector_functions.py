"""First calls of cosine and sine in a process, which MKL needs from one thread.

MKL 2024.2, which torch's wheels hold, looks up the kernel of each vector function at its first call. Where several threads
make that call together, as in a rotary embedding on a CPU, one of them can get a kernel of half the digits for its share, and
nothing says so (https://github.com/pytorch/pytorch/issues/188792): states that are off by 1e-3 (infra/docs/sglang_cpu.md).
infra/sglang_cpu does the same for its servers, which do without this package.
"""

import torch


def resolve_vector_functions() -> None:
    """Call them on one element, which is one thread's work; before anything else computes a cosine."""
    for function in (torch.cos, torch.sin):
        function(torch.zeros(1))
