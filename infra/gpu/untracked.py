"""A stage of the pipeline on a host that has no MLflow: `python -m infra.gpu.untracked tasks.benchmark`."""

import importlib
import sys

from tasks.common.errors import DraftlineError
from tasks.common.params import load_params
from tasks.common.stage import exit_on_signals


class Untracked:
    """A tracker that keeps nothing: the reports hold all of it."""

    def log_metrics(self, *_: object) -> None:
        pass

    def log_artifact(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    exit_on_signals()
    try:
        importlib.import_module(f"{sys.argv[1]}.__main__").main(load_params(), Untracked())
    except DraftlineError as error:
        sys.exit(str(error))
