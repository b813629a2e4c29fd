"""Signals that end training without losing a step: SIGTERM, SIGINT and SIGHUP."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# sysexits.h: try again. Whoever started the run starts it once more, and it goes on from where it was.
RETRY = os.EX_TEMPFAIL
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def retryable() -> Iterator[None]:
    """Also a signal before the first step or after the last one ends with RETRY: what there is to lose is on the disk."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code not in [RETRY, *(128 + number for number in _NUMBERS)]:
            raise
        if int(os.environ.get("RANK", 0)) == 0:
            said = f"stopped by a signal (exit code {RETRY}): what was trained is saved, the same command goes on from there."
            print(said, file=sys.stderr, flush=True)
        raise SystemExit(RETRY) from None


class Interrupted(BaseException):
    """Raised where a signal came while there was nothing to finish."""


class Interrupts:
    """While it is entered a signal is noted in `asked`, and raises only within `at_once`.

    One signal or many are the same: a run that is asked to stop by its group and by its launcher hears of it twice.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # What closes files and runs now is not cut short either; nor what says that a process is missing (a RuntimeError
        # of a collective) by the SIGTERM that torchrun sends for the same reason.
        if not self.asked and not isinstance(error, RuntimeError):
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block a signal, also one that came before, raises Interrupted."""
        self._at_once = True
        try:
            if self.asked:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            self._at_once = False
            raise Interrupted
