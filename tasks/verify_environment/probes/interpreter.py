"""Which interpreter this is and where it would import the pipeline's packages from. Python alone is enough to run it."""

import importlib.machinery
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.verify_environment.probes import respond

# Module: the distribution that it comes in.
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "sglang": "sglang",
    "mlflow": "mlflow",
    "prefect": "prefect",
    "dvc": "dvc",
    "great_expectations": "great-expectations",
}


def find(_arguments: None = None) -> dict:
    return {
        "executable": sys.executable,
        "prefix": str(Path(sys.prefix).resolve()),
        "version": ".".join(map(str, sys.version_info[:3])),
        "packages": {module: _package(module, distribution) for module, distribution in PACKAGES.items()},
    }


def _package(module: str, distribution: str) -> dict:
    locations: list[str] = []
    for entry in sys.path:
        spec = importlib.machinery.PathFinder.find_spec(module, [entry or str(Path.cwd())])
        # A folder without __init__.py is found too, as a namespace; it holds no package.
        if spec is not None and spec.origin is not None:
            folder = str(Path(spec.origin).resolve().parent)
            if folder not in locations:
                locations.append(folder)
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = None
    return {"version": found, "locations": locations}


if __name__ == "__main__":
    respond(find)
