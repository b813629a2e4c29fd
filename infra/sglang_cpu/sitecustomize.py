"""Let the PyPI build of torchvision be imported beside a CPU-only torch.

Python runs this file by itself in every interpreter that has its folder on PYTHONPATH, so a server and
the processes it spawns need nothing else:

    PYTHONPATH=infra/sglang_cpu SGLANG_USE_CPU_ENGINE=1 python -m sglang.launch_server --device cpu ...

That torchvision is linked with CUDA: without libtorch_cuda its operators are not loaded, and its own
`_meta_registrations` then fails on two operators that it takes for granted. transformers imports
torchvision whenever it is installed, so without this hook not even a Llama config can be loaded.
"""

import os
import sys

# What importlib is made of. It is loaded already; importlib itself would cost more than all the rest, and so
# would pathlib.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder


class TorchvisionOperators:
    """A finder that finds nothing: it declares the missing operators just before they are looked up.

    By then torchvision has imported torch and tried to load its operators, so this costs an interpreter
    that never imports torchvision nothing, and steps aside for a torchvision that fits its torch.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations" and not sys.modules["torchvision.extension"]._has_ops():
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


def run_shadowed_sitecustomize():
    """Run the sitecustomize that Python would have run if this folder were not on the path."""
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120
    folders = [os.path.realpath(entry) for entry in sys.path]
    below = [folder for folder in folders[folders.index(here) + 1 :] if folder != here]
    spec = PathFinder.find_spec("sitecustomize", below)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


# Two checkouts on one path would declare the operators twice.
if not any(getattr(finder, "__name__", "") == TorchvisionOperators.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, TorchvisionOperators)
run_shadowed_sitecustomize()
