"""The whole chain under Prefect: the stages of dvc.yaml, one after the other, each through DVC.

    python -m flows.pipeline                              # what is due; cached stages show as cached
    python -m flows.pipeline --until gate_hidden_states   # up to a stage
    python -m flows.pipeline --force benchmark            # measure again

DVC decides what runs and is the only cache; Prefect adds the run's page, live logs, states, timeouts and
deployments (infra/docs/flow.md). The parameters of the stages are in params.yaml, where DVC sees them.
"""

import argparse
import atexit
import gc
import logging
import signal
import sys
import time

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.base import ServerType
from prefect.client.orchestration import get_client
from prefect.states import Completed, Failed, State
from prefect.utilities.urls import url_for
from pydantic import BaseModel, ConfigDict, Field

from flows.dvc_stages import Stage, StageProcess, read_stages
from flows.summary import PipelineResult, StageResult, benchmark_rows, print_summary
from tasks.common.errors import DraftlineError
from tasks.common.params import load_params
from tasks.common.stage import exit_on_signals
from tasks.common.tracking import PipelineRun

# Prefect says so with the stack of an exception that there is not ("NoneType: None"); the state that follows says the same.
logging.getLogger("prefect.task_runs").addFilter(
    lambda record: not record.getMessage().startswith("Task run failed with state")
)


class PipelineParams(BaseModel):
    """What a run is asked to do. What the stages are asked to do is in params.yaml."""

    model_config = ConfigDict(extra="forbid")

    until: str | None = Field(None, description="last stage to bring up to date; empty: all")
    force: list[str] = Field([], description="stages to run again although nothing changed")


@flow(name="pipeline", description=__doc__)
def pipeline(params: PipelineParams = PipelineParams()) -> State:  # noqa: B008
    """Bring the stages up to date in order; the first that fails ends the run and is named in its state."""
    logger = get_run_logger()
    try:
        stages = read_stages(params.until)
        if unknown := set(params.force) - {stage.name for stage in stages}:
            raise DraftlineError(f"force: not among the stages to run: {', '.join(sorted(unknown))}.")
        url = url_for("flow-run", runtime.flow_run.id)  # None under the temporary API server, which has no UI
        tags = {"prefect.flow_run_id": str(runtime.flow_run.id), **({"prefect.flow_run_url": url} if url else {})}
        tracked = PipelineRun(load_params(), runtime.flow_run.name, tags)
    except DraftlineError as error:
        logger.error(str(error))
        return Failed(message=str(error))
    status = "KILLED"
    try:
        results, failure = _run_stages(stages, params.force, tracked)
        status = "FAILED" if failure else "FINISHED"
    finally:
        tracked.close(status)
    return failure or Completed(
        message=f"{len(results)} stages up to date", data=PipelineResult(runtime.flow_run.name, results)
    )


def _run_stages(stages: list[Stage], force: list[str], tracked: PipelineRun) -> tuple[list[StageResult], State | None]:
    """Run until the end or the first failure; returns it as the state that the flow ends in."""
    results: list[StageResult] = []
    failure = None
    progress = create_progress_artifact(progress=0.0, key="progress", description=f"of {len(stages)} stages")
    for stage in stages:
        run = dvc_stage.with_options(
            name=stage.name, description=stage.description, timeout_seconds=stage.timeout_seconds
        )
        began = time.monotonic()
        state = run(stage.name, stage.name in force, tracked.environment, return_state=True)
        results.append(StageResult(stage.name, state.name, round(time.monotonic() - began, 1)))
        if not state.is_completed():
            failure = Failed(message=f"stage {stage.name}: {state.message}")
            break
        if state.name == "Cached":
            tracked.log_headline(stage.name)
        update_progress_artifact(progress, 100.0 * len(results) / len(stages))
    create_table_artifact(
        [result._asdict() for result in results], key="stages", description="In the order of dvc.yaml"
    )
    if "benchmark" in {result.stage for result in results if result.state in ("Completed", "Cached")}:
        create_table_artifact(
            benchmark_rows(), key="benchmark", description="Speculative against plain serving, by domain"
        )
    return results, failure


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def dvc_stage(name: str, force: bool, environment: dict[str, str]) -> State:
    """Run one stage if it is due, its lines in this task's log.

    Called directly, never submitted: only in the main thread do SIGTERM and the timeout interrupt it.
    """
    logger = get_run_logger()
    with StageProcess(name, force, environment) as process:
        for line in process:
            logger.info(line)
        code = process.exit_code()
    if code != 0:
        return Failed(message=process.error() or f"exit code {code}")
    if process.outcome == "unchanged":
        return Completed(name="Cached", message="nothing changed")
    if process.outcome == "restored":
        return Completed(name="Cached", message="restored from DVC's run cache")
    return Completed()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.pipeline", description="Bring the pipeline up to date.")
    for name, field in PipelineParams.model_fields.items():
        many = {"nargs": "+"} if name == "force" else {}
        parser.add_argument(f"--{name}", metavar="STAGE", help=field.description, **many)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    atexit.register(gc.freeze)  # else the collector walks all of Prefect, DVC and MLflow at exit: seconds
    # Prefect hands SIGTERM on to the handler that it found. Python's own would skip atexit, where the
    # temporary API server is stopped.
    exit_on_signals()
    try:
        _start_api()
        state = pipeline(PipelineParams(**given), return_state=True)
    except (KeyboardInterrupt, SystemExit) as stopped:
        code = 128 + signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else stopped.code
        name = signal.Signals(code - 128).name
        print(f"\nThe pipeline was stopped by {name}. The same command goes on from there.", file=sys.stderr)
        sys.exit(code)
    if not state.is_completed():
        print(f"\nThe pipeline failed: {state.message}", file=sys.stderr)
        sys.exit(1)
    print_summary(state.result(), load_params())


def _start_api() -> None:
    """Start Prefect's temporary API server, where no other is configured, deaf to the signals that end a run.

    A terminal, `kill -- -PGID` and service managers send them to the whole process group. A run whose API went
    away first would spend minutes trying to tell it how it ended.
    """
    ending = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # a child inherits the mask
    try:
        with get_client(sync_client=True) as client:
            if client.server_type == ServerType.EPHEMERAL:
                atexit.register(_kill_api)  # registered after Prefect's own, which would wait, it runs before it
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)


def _kill_api() -> None:
    """The server is deaf to Prefect's own way. States and logs are in its database by now."""
    from prefect.server.api.server import SubprocessASGIServer

    if server := SubprocessASGIServer().server_process:
        server.kill()


if __name__ == "__main__":
    main()
