"""How large the first cosine and sine of a process are, as code for a process of its own."""

ONE_ELEMENT = "{'cos': 1, 'sin': 1}"  # what `print(first.sizes)` says
FIRST_CALLS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class FirstCalls(TorchDispatchMode):
    sizes = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in ("cos", "sin"):
            self.sizes.setdefault(operator.overloadpacket.__name__, args[0].numel())
        return operator(*args, **(kwargs or {}))
"""
