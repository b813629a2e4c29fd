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


def exit_on_signals() -> None:
    """Leave by SystemExit on SIGTERM, and on the hang-up of a terminal unless nohup said to ignore it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def _refuse_arguments(main: Callable) -> None:
    """A stage takes none: what it does stands in params.yaml, and a slip must not start hours of work."""
    if sys.argv[1:]:
        asked = sys.argv[1:] in (["--help"], ["-h"])
        print(sys.modules[main.__module__].__doc__, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else f"unknown arguments: {' '.join(sys.argv[1:])}")


def run_stage(name: str, main: Callable[[Params, Tracker], None]) -> None:
    """Run `main(params, tracker)` as the stage `name`, then exit the process on failure.

    SIGTERM and SIGHUP raise SystemExit, so that context managers stop servers and close files.
    """
    _refuse_arguments(main)
    exit_on_signals()
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
