"""How every stage and command starts and ends: parameters, versions, signals, tracking, one readable error."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.common.errors import DraftlineError, signal_of
from tasks.common.files import REPORTS, require_writable
from tasks.common.params import Params, load_params
from tasks.common.tracking import Tracker
from tasks.common.versions import require_verified_versions


def exit_on_signals() -> None:
    """Leave by SystemExit on SIGTERM, and on the hang-up of a terminal unless nohup said to ignore it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


@contextmanager
def ending_in_words(name: str) -> Iterator[None]:
    """A command's whole work: what ends it early is a sentence, with the notes that the exception got on its way.

    SIGTERM and SIGHUP raise SystemExit, so that context managers stop servers and close files. Exits with 1 on a
    DraftlineError, with 128 and the signal's number on a signal.
    """
    exit_on_signals()
    # OpenMP reads it when torch is loaded. Idle threads that spin cost a busy machine several times the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        yield
    except DraftlineError as error:
        _say("\n".join([f"{name} failed:\n{error}", *_notes(error)]))
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as ended:
        number = signal_of(ended)
        if number is None:
            raise
        _say(" ".join([f"{name} was stopped by {number.name}.", *_notes(ended)]))
        sys.exit(128 + number)


def _refuse_arguments(main: Callable) -> None:
    """A stage takes none: what it does stands in params.yaml, and a slip must not start hours of work."""
    if sys.argv[1:]:
        asked = sys.argv[1:] in (["--help"], ["-h"])
        print(sys.modules[main.__module__].__doc__, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else f"unknown arguments: {' '.join(sys.argv[1:])}")


def run_stage(name: str, main: Callable[[Params, Tracker], None]) -> None:
    """Run `main(params, tracker)` as the stage `name`, then exit the process on failure."""
    _refuse_arguments(main)
    atexit.register(gc.freeze)  # else the collector walks all of MLflow and torch at exit: a second or more
    with ending_in_words(name):
        params = load_params()
        if name != "verify_environment":
            require_verified_versions()
        require_writable(REPORTS)  # before hours are spent on what is to lie there
        with Tracker.stage(name, params) as tracker:
            main(params, tracker)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
