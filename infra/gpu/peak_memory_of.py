"""Run a module as `python -m` does; when it ends, write what torch had allocated on the GPU at most.

python peak_memory_of.py PEAK.json MODULE ARGUMENTS...
"""

import atexit
import json
import runpy
import sys
from pathlib import Path


def _write(path: Path) -> None:
    import torch

    if torch.cuda.is_initialized():
        path.write_text(json.dumps(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    out, module, *arguments = sys.argv[1:]
    atexit.register(_write, Path(out))
    sys.path.pop(0)  # this folder, which `python -m` would not have
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
