"""A stage of the pipeline on a host that has no MLflow: `python -m infra.gpu.untracked tasks.benchmark`."""

import importlib
import sys

from tasks.common.params import load_params
from tasks.common.stage import ending_in_words


class Untracked:
    """A tracker that keeps nothing: the reports hold all of it."""

    def log_metrics(self, *_: object) -> None:
        pass

    def log_artifact(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with ending_in_words(sys.argv[1]):
        importlib.import_module(f"{sys.argv[1]}.__main__").main(load_params(), Untracked())
