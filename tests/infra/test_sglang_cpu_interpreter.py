"""infra/sglang_cpu on PYTHONPATH: what it does to an interpreter that starts."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.first_calls import FIRST_CALLS, ONE_ELEMENT
from tests.infra.stand_in import SGLANG_CPU


def python(code, *folders, extra=None, **options):
    path = os.pathsep.join(str(folder) for folder in (SGLANG_CPU, *folders))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | (extra or {}),
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_an_interpreter_starts_without_torch():
    assert python("import sys; print('torch' in sys.modules)").stdout.strip() == "False"


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvision_and_the_operators_can_be_imported():
    code = """
import torchvision, sgl_kernel, torch
print(torch.ops.torchvision.nms, sgl_kernel.__file__, hasattr(torch.ops.sgl_kernel, "convert_weight_packed"))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torchvision.nms", str(SGLANG_CPU / "sgl_kernel" / "__init__.py"), "False"]


def test_the_first_cosine_and_sine_of_a_server_are_one_threads_work():
    """Not the rotary table's, which is several threads' work and is kept.

    Where the processor has AMX, SGLang imports the operators at once, elsewhere with the model's class: before the table.
    """
    code = """
with FirstCalls() as first:
    import sglang.srt.models.llama
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding(16, 16, 1024, 10000, True, torch.float32)
print(first.sizes)
"""
    done = python(FIRST_CALLS + code, extra={"SGLANG_USE_CPU_ENGINE": "1"})
    assert done.stdout.splitlines()[-1:] == [ONE_ELEMENT], done.stderr


def test_a_torchvision_that_fits_is_left_alone(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension, _meta_registrations")
    (package / "extension.py").write_text("def _has_ops(): return True")
    (package / "_meta_registrations.py").write_text("")
    done = python("import torchvision, sys; print('torch' in sys.modules)", tmp_path)
    assert done.stdout.strip() == "False", done.stderr


def test_a_sitecustomize_further_down_the_path_still_runs(tmp_path):
    """Also when this folder is there twice, under two names: it does not run itself for ever."""
    (tmp_path / "again").symlink_to(SGLANG_CPU)
    (tmp_path / "sitecustomize.py").write_text("print('also here')")
    done = python("", tmp_path / "again", tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("also here", "")


def test_two_checkouts_on_the_path_declare_the_operators_once(tmp_path):
    shutil.copy(SGLANG_CPU / "sitecustomize.py", tmp_path)
    done = python("import sys; print(str(sys.meta_path).count('TorchvisionOperators'))", tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
