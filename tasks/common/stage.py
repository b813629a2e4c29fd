"""How every stage starts and ends: parameters, versions, signals, tracking, one readable error."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable

from tasks.common.errors import DraftlineError
from tasks.common.params import Params, load_params
from tasks.common.tracking import Tracker
from tasks.common.versions import require_verified_versions


def run_stage(name: str, main: Callable[[Params, Tracker], None]) -> None:
    """Run `main(params, tracker)` as the stage `name`, then exit the process on failure.

    SIGTERM raises SystemExit, so that context managers stop servers and close files.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # OpenMP reads it when torch is loaded. Idle threads that spin cost a busy machine several times the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    atexit.register(gc.freeze)  # else the collector walks all of MLflow and torch at exit: a second or more
    try:
        params = load_params()
        if name != "verify_environment":
            require_verified_versions()
        with Tracker.stage(name, params) as tracker:
            main(params, tracker)
    except DraftlineError as error:
        print(f"{name} failed:\n{error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
