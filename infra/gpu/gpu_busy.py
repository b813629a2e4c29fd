"""How busy the first GPU is while something runs, as the driver says."""

import threading
import time

from tasks.common.gpu import query

_EVERY_S = 0.4


class Busy:
    """Asks the driver every now and then within the block."""

    def __enter__(self) -> "Busy":
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def since(self, moment: float) -> float | None:
        """Mean share of time with a kernel running, from `time.perf_counter()` = moment on; None without a driver."""
        shares = [share for at, share in self._samples if at > moment]
        return round(sum(shares) / len(shares), 3) if shares else None

    def _ask(self) -> None:
        while not self._stop.wait(_EVERY_S):
            rows = query("--query-gpu=utilization.gpu")
            if not rows or not rows[0][0].isdigit():
                return
            self._samples.append((time.perf_counter(), int(rows[0][0]) / 100))
