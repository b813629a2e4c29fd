"""Functions of tensors that are compiled where they run on a GPU, once for each shape that they meet.

Whoever calls them keeps the shapes few: a batch is padded to fixed sizes there (`Rows`, `BatchForm`). On a CPU they run as
they are written, on sizes as they come: nothing waits for a compiler, and nothing is computed for padding.
"""

from collections.abc import Callable
from typing import Any

import torch

COMPILED_ON = {"cuda"}
# Shapes times forms (with and without gradient, own keys of 1..K-1 steps); beyond it torch would run uncompiled, in silence.
_MOST_GRAPHS = 256


def compiles_on(device: torch.device | str) -> bool:
    return torch.device(device).type in COMPILED_ON


class Kernel:
    """`function`, whose first argument is a tensor; compiled for a device that compiles."""

    def __init__(self, function: Callable):
        self.function = function
        self.__doc__ = function.__doc__
        self._compiled: Callable | None = None

    def __call__(self, *args: Any) -> Any:
        if not compiles_on(args[0].device):
            return self.function(*args)
        if self._compiled is None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
            self._compiled = torch.compile(self.function, dynamic=False, fullgraph=True)
        return self._compiled(*args)
