"""How runs are laid out in MLflow: parents, children, datasets, tags (infra/docs/tracking.md has the picture)."""

import getpass
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.common.dvc_files import DvcFiles, lock_md5
from tasks.common.errors import DraftlineError
from tasks.common.git import git
from tasks.common.headline import log_headline
from tasks.common.params import Params
from tasks.common.params import Tracking as TrackingParams

if TYPE_CHECKING:
    import psutil
    from mlflow import MlflowClient

PARENT_VARIABLE = "DRAFTLINE_PARENT_RUN_ID"  # not MLFLOW_RUN_ID: a child that sees that one writes into the parent


@dataclass(frozen=True)
class Run:
    """A run in MLflow; `parent` is its own id where it is a parent."""

    client: "MlflowClient"
    id: str
    parent: str

    def log_metrics(self, metrics: dict[str, float], step: int, at: float) -> None:
        """Log numbers measured at Unix time `at`."""
        from mlflow.entities import Metric

        self.client.log_batch(
            self.id, metrics=[Metric(name, float(value), ms(at), step) for name, value in metrics.items()]
        )


def open_stage_run(stage: str, params: Params, started: float) -> Run:
    """Create the run of a stage, under the parent it belongs to.

    The parent is the flow's, which passes its id in DRAFTLINE_PARENT_RUN_ID; else that of the `dvc` process
    above this one, shared by all stages of one `dvc repro`; else one that this stage has to itself.
    """
    import psutil

    client = connect(params.tracking)
    experiment = _experiment_id(client, params.tracking.experiment)
    files = DvcFiles()
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        dvc = _dvc_process()
        process = _process_tag(dvc or psutil.Process())
        found = client.search_runs([experiment], f"tags.process = '{process}'", max_results=1)
        if found:
            parent = found[0].info.run_id
            client.update_run(parent, status="RUNNING")
        else:
            name = f"{'dvc repro' if dvc else stage} {time.strftime('%Y-%m-%d %H:%M:%S')}"
            parent = _create_parent(client, experiment, name, params, {"process": process})
            # What lies above this stage did not have to run, so no other stage will log its results.
            log_headline(client, parent, files.upstream(stage), params)
    tags = {
        "mlflow.parentRunId": parent,
        "mlflow.note.content": files.description(stage),
        "stage": stage,
        **_user_tag(),
    }
    run_id = client.create_run(experiment, start_time=ms(started), run_name=stage, tags=tags).info.run_id
    names = files.parameter_names(stage)
    mine = {key: value for key, value in _flatten(params).items() if any(f"{key}.".startswith(f"{n}.") for n in names)}
    _log_params(client, run_id, mine)
    _log_inputs(client, run_id, stage, files)
    return Run(client, run_id, parent)


def open_pipeline_run(params: Params, name: str, tags: dict[str, str]) -> Run:
    """Create a parent for a whole pipeline run that this process holds."""
    import psutil

    client = connect(params.tracking)
    experiment = _experiment_id(client, params.tracking.experiment)
    run_id = _create_parent(client, experiment, name, params, {"process": _process_tag(psutil.Process()), **tags})
    return Run(client, run_id, run_id)


def close_pipeline_run(client: "MlflowClient", run_id: str, status: str) -> None:
    """End a parent, and children that were killed before they could end themselves."""
    experiment = client.get_run(run_id).info.experiment_id
    for child in client.search_runs(
        [experiment], f"tags.mlflow.parentRunId = '{run_id}' and attributes.status = 'RUNNING'"
    ):
        client.set_terminated(child.info.run_id, "KILLED")
    for key, value in _lock_tag().items():
        client.set_tag(run_id, key, value)
    client.set_terminated(run_id, status)


def connect(params: TrackingParams) -> "MlflowClient":
    """A client of the tracking store; the first one creates an SQLite file.

    Raises:
        DraftlineError: the URI can never work. Anything else that is raised may pass with time.
    """
    is_sqlite = params.uri.startswith("sqlite")
    if is_sqlite and not os.access(folder := Path(params.uri.partition("///")[2]).parent, os.W_OK):
        raise _bad_uri(params.uri, f"{folder} is not a folder that can be written")
    # MLflow's own patience (7 retries of 120 s) would hold up the stage at every call.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return MlflowClient(tracking_uri=params.uri)
    except Exception as error:
        if is_sqlite and "database is locked" in str(error):  # by another run, for as long as that writes
            raise
        if is_sqlite or isinstance(error, MlflowException | ModuleNotFoundError):
            raise _bad_uri(params.uri, str(error).strip().splitlines()[0].split(". ")[0]) from None
        raise


def _bad_uri(uri: str, reason: str) -> DraftlineError:
    return DraftlineError(
        f"params.yaml: tracking.uri {uri}: {reason}. Expected sqlite:///<file>, a database URI, or http(s)://<server>."
    )


def _experiment_id(client: "MlflowClient", name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # Without a kind the UI takes it for one of agents, and shows no link to its runs.
        return client.create_experiment(name, tags={"mlflow.experimentKind": "custom_model_development"})
    if experiment.lifecycle_stage != "active":
        raise DraftlineError(
            f"params.yaml: tracking.experiment {name}: deleted in MLflow. Restore it "
            f"(`mlflow experiments restore -x {experiment.experiment_id}`) or choose another name."
        )
    return experiment.experiment_id


def _create_parent(client: "MlflowClient", experiment: str, name: str, params: Params, tags: dict[str, str]) -> str:
    _bury_the_dead(client, experiment)
    tags = {"target": params.target.model, **_git_tags(), **_user_tag(), **_lock_tag(), **tags}
    run_id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
    _log_params(client, run_id, _flatten(params))
    return run_id


def _bury_the_dead(client: "MlflowClient", experiment: str) -> None:
    """End the runs of this machine that nobody ended, because the process that held them was killed."""
    import psutil

    here = f"tags.process LIKE '{socket.gethostname()}:%' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment], here):
        held_by = run.data.tags["process"]
        try:
            alive = _process_tag(psutil.Process(int(held_by.split(":")[1]))) == held_by
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            close_pipeline_run(client, run.info.run_id, "KILLED")


def _dvc_process() -> "psutil.Process | None":
    """The nearest ancestor that is `dvc` or `python -m dvc`."""
    import psutil

    for process in psutil.Process().parents():
        try:
            words = [Path(word).name for word in process.cmdline()[:4]]
        except psutil.Error:
            continue
        if "dvc" in words[:2] or "-m dvc" in " ".join(words):
            return process
    return None


def _process_tag(process: "psutil.Process") -> str:
    """Names a process for good: pids come back, but not with the same start."""
    return f"{socket.gethostname()}:{process.pid}:{process.create_time():.2f}"


def _log_params(client: "MlflowClient", run_id: str, params: dict[str, str]) -> None:
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])


def _log_inputs(client: "MlflowClient", run_id: str, stage: str, files: DvcFiles) -> None:
    """The stage's inputs as datasets: digest and tag are DVC's MD5, the data stay in DVC."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(
            Dataset(
                name=artifact.path.removeprefix("artifacts/"),
                digest=artifact.md5.removesuffix(".dir"),
                source_type="local",
                source=json.dumps({"uri": artifact.path}),
            ),
            tags=[InputTag("dvc_md5", artifact.md5), InputTag("mlflow.data.context", stage)],
        )
        for artifact in files.input_artifacts(stage)
    ]
    if inputs:
        client.log_inputs(run_id, inputs)


def _flatten(params: Params) -> dict[str, str]:
    """{'train_draft.learning_rate': '0.001', ...} of all sections."""
    sections = params.model_dump(mode="json").items()
    return {f"{section}.{key}": str(value) for section, values in sections for key, value in values.items()}


def _git_tags() -> dict[str, str]:
    """Commit, and whether tracked files differ from it; nothing outside a repository with a commit."""
    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"git.commit": git("rev-parse", "HEAD"), "git.dirty": str(changed).lower()}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _lock_tag() -> dict[str, str]:
    md5 = lock_md5()
    return {"dvc.lock.md5": md5} if md5 else {}


def _user_tag() -> dict[str, str]:
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):  # a container's user without a passwd entry
        return {}


def ms(seconds: float) -> int:
    """Unix time as MLflow wants it."""
    return int(seconds * 1000)
