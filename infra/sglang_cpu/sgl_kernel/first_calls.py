"""First calls that must not be made by several threads at once.

MKL 2024.2, which torch's wheels hold, looks up the kernel of each vector function at its first call. Where threads make
that call together, one of them can get a kernel of half the digits for its share of it, and nothing says so
(https://github.com/pytorch/pytorch/issues/188792). SGLang's first cosine is the table of its rotary embedding, which is
large enough for several threads and is kept: seen once in some thirty servers, the cosines of the first positions were
off by 1.5e-4, and every state by 1e-3, for as long as the server ran.
"""

import torch


def resolve_vector_functions():
    """Call the functions of that table on one element, which is one thread's work."""
    for function in (torch.cos, torch.sin):
        function(torch.zeros(1))
