"""What a pipeline run is judged by, on its parent run: read from the reports, so cached stages count too.

Scalars                           `predicted_accept_length`, `accept_length`, `speedup`, `lossless` (0 or 1),
                                  `tokens_per_s/speculative`, `tokens_per_s/baseline`
`accept_length/<bench>`           at step = draft tokens a round
`accept_rate_by_position/<bench>` at step = position, 1 the first draft token: share of rounds in which that
                                  token was accepted (survival)

<bench> is a domain of the held-out prompts, or `all`. Acceptance length as in the contract, section 4.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.common.dvc_files import DvcFiles
from tasks.common.files import REPORTS, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Point(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    step: int = 0


def headline(stages: Iterable[str]) -> list[Point]:
    """The headline of those of the given stages that have one and whose report is there."""
    points: list[Point] = []
    for stage, read in (("train_draft", _predicted), ("benchmark", _served)):
        report = REPORTS / f"{stage}.json"
        if stage in stages and report.exists():
            points += read(read_json(report))
    return points


def log_headline(client: "MlflowClient", run_id: str, stages: Iterable[str]) -> None:
    """Log the headline of `stages` on the parent run, and the served figures on the draft's LoggedModel.

    Only stages that this pipeline run has brought up to date may be named: a report that an earlier run
    left behind is on disk as well, and would pass for this run's.
    """
    from mlflow.entities import LoggedModelOutput, Metric

    points = headline(stages)
    if not points:
        return
    served = {point.name for point in points if point.name.startswith("accept_length")}
    model_id = _draft_model(client, run_id) if served else None
    if model_id:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
    now = int(time.time() * 1000)
    client.log_batch(
        run_id,
        metrics=[Metric(p.name, p.value, now, p.step, model_id=model_id if p.name in served else None) for p in points],
    )


def _predicted(report: dict[str, Any]) -> list[Point]:
    return [Point("predicted_accept_length", report["predicted_accept_length"])]


def _served(report: dict[str, Any]) -> list[Point]:
    speculative, draft_tokens = report["speculative"], report["settings"]["draft_tokens"]
    benches = [{"domain": "all", **speculative}, *report["by_domain"]]
    return [
        Point("accept_length", speculative["accept_length"]),
        Point("speedup", report["speedup"]),
        Point("lossless", float(report["lossless"])),
        Point("tokens_per_s/speculative", speculative["tokens_per_s"]),
        Point("tokens_per_s/baseline", report["baseline"]["tokens_per_s"]),
        *(Point(f"accept_length/{bench['domain']}", bench["accept_length"], draft_tokens) for bench in benches),
        *(
            Point(f"accept_rate_by_position/{bench['domain']}", rate, position)
            for bench in benches
            for position, rate in enumerate(bench.get("survival", []), 1)
        ),
    ]


def _draft_model(client: "MlflowClient", run_id: str) -> str | None:
    """Id of the exported draft's LoggedModel, made when these weights are first seen; they stay in DVC."""
    import mlflow

    draft = DvcFiles().output_artifact("export_draft")
    if draft is None:
        return None
    run = client.get_run(run_id)
    known = client.search_logged_models([run.info.experiment_id], f"tags.dvc_md5 = '{draft.md5}'", max_results=1)
    if known:
        return known[0].model_id
    mlflow.set_tracking_uri(client.tracking_uri)
    model = mlflow.create_external_model(
        name="eagle3-draft",
        source_run_id=run_id,
        model_type="eagle3-draft",
        params={name: value for name, value in run.data.params.items() if name.startswith("train_draft.")},
        tags={"dvc_md5": draft.md5, "dvc_path": draft.path, "target": run.data.params.get("target.model", "")},
        experiment_id=run.info.experiment_id,
    )
    return model.model_id
