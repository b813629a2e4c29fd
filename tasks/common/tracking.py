"""MLflow: one parent run for a pipeline run, a child a stage (layout in infra/docs/tracking.md).

MLflow serves the record, not the run: only a URI that can never work stops a stage. When MLflow does not
answer, a stage says so once, keeps what it has to log, and sends it when MLflow is back.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.headline import log_headline
from tasks.common.mlflow_layout import PARENT_VARIABLE, Run, close_pipeline_run, ms, open_pipeline_run, open_stage_run
from tasks.common.params import Params

_RETRY_SECONDS = 60.0
# Exit codes of a process that a signal ended, and of one that saved what it had first.
_SIGNALLED = (129, 130, 143, os.EX_TEMPFAIL)


class Tracker:
    """The MLflow run of one stage. MLflow is imported when the stage starts, not when this module is."""

    def __init__(self, name: str, params: Params):
        self._name, self._params = name, params
        self._started = time.time()
        self._outbox = _Outbox(params.tracking.uri, lambda: open_stage_run(name, params, self._started))

    @classmethod
    @contextmanager
    def stage(cls, name: str, params: Params) -> Iterator["Tracker"]:
        """Open the child run of stage `name` under the pipeline run's parent; failed on an exception.

        Under torchrun only rank 0 records.

        Raises:
            DraftlineError: `tracking.uri` can never work (unknown scheme, no such folder, no driver).
        """
        tracker = cls(name, params)
        if os.environ.get("RANK", "0") == "0":
            tracker._outbox.open()
        try:
            yield tracker
        except BaseException as error:
            tracker._close("KILLED" if _is_signal(error) else "FAILED")
            raise
        tracker._close("FINISHED")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log numbers; '/' in a name makes a chart section."""
        now = time.time()
        self._outbox.put(lambda run: run.log_metrics(metrics, step or 0, now))

    def log_artifact(self, path: Path) -> None:
        """Attach a small file (report, plot)."""
        self._outbox.put(lambda run: run.client.log_artifact(run.id, str(path)))

    def log_table(self, columns: dict[str, list], name: str) -> None:
        """Add rows to the table `name`.json, which MLflow shows as one."""

        def log(run: Run) -> None:
            with warnings.catch_warnings(action="ignore"):  # of pandas to MLflow's authors
                run.client.log_table(run.id, columns, f"{name}.json")

        self._outbox.put(log)

    def _close(self, status: str) -> None:
        ended = time.time()

        def close(run: Run) -> None:
            run.log_metrics({"stage_seconds": round(ended - self._started, 3)}, 0, ended)
            run.client.set_terminated(run.id, status, end_time=ms(ended))
            if status == "FINISHED":
                log_headline(run.client, run.parent, [self._name], self._params)
            if PARENT_VARIABLE not in os.environ:  # the flow ends its own; here no later process is sure to come
                close_pipeline_run(run.client, run.parent, status)

        self._outbox.close(close)


class PipelineRun:
    """The parent run, held by whoever runs a whole pipeline and gives `environment` to every stage."""

    def __init__(self, params: Params, name: str, tags: dict[str, str]):
        """Open the parent run.

        Raises:
            DraftlineError: MLflow cannot be used. Nothing has been spent yet, so silence counts as well.
        """
        try:
            run = open_pipeline_run(params, name, tags)
        except DraftlineError:
            raise
        except Exception as error:
            raise DraftlineError(
                f"params.yaml: tracking.uri {params.tracking.uri}: MLflow does not answer ({_cause(error)}). "
                f"Start it, or track into a file: `uri: sqlite:///mlflow.db`."
            ) from None
        self.environment, self._params = {PARENT_VARIABLE: run.id}, params
        self._outbox = _Outbox(params.tracking.uri, lambda: run)
        self._outbox.open()

    def log_headline(self, stage: str) -> None:
        """Log what an unchanged stage had measured."""
        self._outbox.put(lambda run: log_headline(run.client, run.id, [stage], self._params))

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        if status == "KILLED":  # 10 s are all there is between a signal and the end
            os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
        self._outbox.close(lambda run: close_pipeline_run(run.client, run.id, status))


class _Outbox:
    """Operations on a run, done at once and in order; kept while MLflow does not answer."""

    def __init__(self, uri: str, open_run: Callable[[], Run]):
        self._uri, self._open_run = uri, open_run
        self._run: Run | None = None
        self._is_open = self._warned = False
        self._waiting: list[Callable[[Run], None]] = []
        self._retry_at = 0.0

    def open(self) -> None:
        """Open the run; until then nothing is recorded.

        Raises:
            DraftlineError: waiting will not help.
        """
        self._is_open = True
        self._try(raises=(DraftlineError,))

    def put(self, operation: Callable[[Run], None]) -> None:
        """Do `operation`, after those that wait."""
        if self._is_open:
            self._waiting.append(operation)
            if time.monotonic() >= self._retry_at:
                self._try()

    def close(self, operation: Callable[[Run], None]) -> None:
        """Do the last operation; say what is lost."""
        if self._is_open:
            self._waiting.append(operation)
            self._try()
            if self._waiting:
                self._warn(
                    f"did not come back: {len(self._waiting)} records are lost to it. The results are in reports/."
                )

    def _try(self, raises: tuple[type[Exception], ...] = ()) -> None:
        began = time.monotonic()
        try:
            self._run = self._run or self._open_run()
            while self._waiting:
                self._do(self._waiting[0])
                del self._waiting[0]
        except raises:
            raise
        except Exception as error:  # network, database, disk: the record waits, the run goes on
            now = time.monotonic()
            self._retry_at = now + max(_RETRY_SECONDS, 20 * (now - began))
            if not self._warned:
                self._warn(
                    f"does not answer ({_cause(error)}). The run goes on; its record follows when MLflow is back."
                )
            self._warned = True

    def _do(self, operation: Callable[[Run], None]) -> None:
        try:
            operation(self._run)
        except Exception as error:
            if getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE":
                raise
            self._warn(f"refuses a record, which is left out: {_cause(error)}")

    def _warn(self, message: str) -> None:
        print(f"MLflow at {self._uri} {message}", file=sys.stderr, flush=True)


def _is_signal(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in _SIGNALLED)


def _cause(error: BaseException) -> str:
    """First line of the exception that started it: a refused connection comes wrapped five times."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
