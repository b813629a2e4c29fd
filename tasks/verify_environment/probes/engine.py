"""What the server will import: SGLang, its kernels, its attention backends, its class of the target.

Run in the environment that the server will get. Nothing is loaded and no port is opened.
"""

import importlib
import re
from importlib.metadata import version
from pathlib import Path

from tasks.verify_environment.probes import reason, respond

# What `python -m sglang.launch_server` and the scheduler process that it starts import.
_ENGINE = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")
_BACKENDS = "sglang.srt.layers.attention"
# Backend: the kernels that it needs, beside the module of its own name.
_KERNELS = {
    "fa3": ("sgl_kernel.flash_attn",),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
    "flashmla": ("sgl_kernel.flash_mla",),
    "intel_amx": ("sgl_kernel",),
    "triton": ("triton",),
    "trtllm_mha": ("flashinfer",),
    "trtllm_mla": ("flashinfer",),
}
# Backends that live in a module of another name.
_MODULES = {"fa3": "flashattention_backend", "fa4": "flashattention_backend", "flex_attention": "torch_flex_backend"}


def find(arguments: dict) -> dict:
    """`arguments` holds `backends` (names) and `architecture`, of which the engine's class is wanted."""
    imports = [_import("kernels", "sgl_kernel"), *(_import("engine", module) for module in _ENGINE)]
    for backend in arguments["backends"]:
        kernels = _KERNELS.get(backend, ())
        imports += [
            _import("attention", m) for m in (*kernels, f"{_BACKENDS}.{_MODULES.get(backend, f'{backend}_backend')}")
        ]
    module = _module_of(arguments["architecture"]) if arguments["architecture"] else None
    captures = None
    if module:
        imports.append(_import("model", module))
        if imports[-1]["error"] is None:
            model = getattr(importlib.import_module(module), arguments["architecture"])
            captures = hasattr(model, "set_eagle3_layers_to_capture")
    return {"version": version("sglang"), "imports": imports, "captures": captures}


def _import(role: str, module: str) -> dict:
    try:
        importlib.import_module(module)
    except Exception as error:
        return {"role": role, "module": module, "error": reason(error)}
    return {"role": role, "module": module, "error": None}


def _module_of(architecture: str) -> str | None:
    """The module of SGLang's models that defines the class, found by reading: importing all takes a minute."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    for path in sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py")):
        if definition.search(path.read_text(encoding="utf-8")):
            return f"sglang.srt.models.{path.stem}"
    return None


if __name__ == "__main__":
    respond(find)
