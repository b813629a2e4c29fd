"""The versions that change results: a dependency of every later stage, and checked again as each starts."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json

VERSIONS = ARTIFACTS / "environment" / "versions.json"
# Kernels are listed under the names their wheels have on GPU hosts; absent ones are recorded as absent.
_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "triton",
)


def result_versions() -> dict[str, str | None]:
    """Versions of Python and of each package that computes something; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def require_verified_versions(path: Path = VERSIONS) -> None:
    """Refuse to run a stage under other versions than `verify_environment` recorded.

    Raises:
        DraftlineError: nothing was recorded, or a version differs; names each with both values.
    """
    recorded, running = read_json(path), result_versions()
    changed = [
        f"{name} {recorded.get(name)} -> {running[name]}" for name in running if recorded.get(name) != running[name]
    ]
    if changed:
        raise DraftlineError(
            f"{path}: versions changed since the environment was verified: {', '.join(changed)}. They change results, "
            f"so record them and rebuild what depends on them: `dvc repro --force --single-item verify_environment && dvc repro`."
        )
