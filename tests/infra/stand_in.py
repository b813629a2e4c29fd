"""infra/sglang_cpu as the tests of its operators see it; importing this declares torch.ops.sgl_kernel."""

import importlib.util
import sys
from pathlib import Path

SGLANG_CPU = Path(__file__).parents[2] / "infra" / "sglang_cpu"


def load_kernel():
    """The package under a name of its own: a real sgl_kernel elsewhere in this process keeps its own."""
    folder = SGLANG_CPU / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel_stand_in", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel = load_kernel()
