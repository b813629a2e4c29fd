"""What a pipeline run is judged by, on its parent run: read from the reports, so cached stages count too.

Scalars                           `predicted_accept_length` (at serve.num_steps), `accept_length`, `speedup`, `lossless` (0 or 1),
                                  `tokens_per_s/speculative`, `tokens_per_s/baseline`, at the lowest concurrency
`accept_length/<bench>`           at step = draft tokens a round
`accept_rate_by_position/<bench>` at step = position, 1 the first draft token: share of rounds in which that
                                  token was accepted (survival)
`speedup/<set>`                   at step = requests at once
`tokens_per_s/<set>/speculative`  at step = requests at once, of all together; the same with `baseline`

<bench> is a set of the benchmark, a domain of its prompts, or `all`. Acceptance length as in the contract, section 4. All
is greedy. Of a draft that was measured beside the run's own the series start with `<draft>/`, and its tokens per second
are `tokens_per_s/<set>/<draft>`.
"""

import posixpath
import re
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.common.benchmark_names import BASELINE, OURS, POOLED
from tasks.common.dvc_files import DvcFiles
from tasks.common.errors import DraftlineError, in_a_line
from tasks.common.files import REPORTS, read_json, sha256_json
from tasks.common.params import Params
from tasks.common.training_report import predicted_accept_length

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Point(NamedTuple):
    """One value of a metric.

    Attributes:
        of_draft: said of the exported draft's weights, whatever machine serves them.
    """

    name: str
    value: float
    step: int = 0
    of_draft: bool = False


def headline(stage: str, params: Params) -> list[Point]:
    """What the report of a stage says of what `params` serve; nothing where it has none."""
    report, points = REPORTS / f"{stage}.json", []
    if stage == "train_draft" and report.exists():
        points = [Point("predicted_accept_length", predicted_accept_length(params.serve.num_steps))]
    elif stage == "benchmark" and report.exists():
        points = _served(read_json(report))
    return [point._replace(name=_accepted(point.name)) for point in points]


def _accepted(name: str) -> str:
    """A metric's name as it is, or, of one that MLflow refuses, its letters and a hash that keeps it apart from others."""
    if re.fullmatch(r"[/\w.\- :]{1,250}", name) and posixpath.normpath(name) == name and name[0] not in "./":
        return name
    section, _, rest = name.partition("/")
    return "/".join(re.sub(r"[^\w\- ]", "_", part)[:100] for part in (section, rest)) + f"_{sha256_json(name)[:6]}"


def log_headline(client: "MlflowClient", run_id: str, stages: Iterable[str], params: Params) -> None:
    """Log the headline of `stages` on the parent run, and the served figures on the draft's LoggedModel.

    Only stages that this pipeline run has brought up to date may be named: a report that an earlier run
    left behind is on disk as well, and would pass for this run's.
    """
    from mlflow.entities import LoggedModelOutput, Metric

    points: list[Point] = []
    for stage in stages:
        try:
            points += headline(stage, params)
        except (DraftlineError, LookupError, TypeError, AttributeError, ValueError) as error:
            # A damaged report is its gate's to name.
            print(f"{stage}: nothing of its report goes on the parent run ({in_a_line(error)}).", file=sys.stderr, flush=True)
    if not points:
        return
    model_id = _draft_model(client, run_id) if any(point.of_draft for point in points) else None
    if model_id:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
    now = int(time.time() * 1000)
    client.log_batch(
        run_id,
        metrics=[Metric(p.name, p.value, now, p.step, model_id=model_id if p.of_draft else None) for p in points],
    )


def _served(report: dict[str, Any]) -> list[Point]:
    speculative, draft_tokens = report["speculative"], report["settings"]["draft_tokens"]
    return [
        Point("accept_length", speculative["accept_length"], of_draft=True),
        Point("speedup", report["speedup"]),
        Point("lossless", float(report["lossless"])),
        Point("tokens_per_s/speculative", speculative["tokens_per_s"]),
        Point("tokens_per_s/baseline", report["baseline"]["tokens_per_s"]),
        *(
            Point(f"accept_length/{bench}", of_bench["accept_length"], draft_tokens, of_draft=True)
            for bench, of_bench in _benches(report).items()
        ),
        *_survival("", _benches(report)),
        *_by_concurrency(report),
        *(point for draft in report["drafts"] if draft != OURS for point in _foreign(report, draft)),
    ]


def _benches(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured with the run's own draft, each name once: a set by path is a domain as well."""
    domains = {row["domain"]: row for row in report["by_domain"]}
    return domains | _sets(report, OURS) | {POOLED: report["speculative"]}


def _sets(report: dict[str, Any], draft: str) -> dict[str, dict[str, Any]]:
    """A draft's greedy cells at the lowest concurrency, by set."""
    lowest = min(cell["concurrency"] for cell in report["cells"])
    return {cell["set"]: cell for cell in _greedy(report) if (cell["draft"], cell["concurrency"]) == (draft, lowest)}


def _greedy(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in report["cells"] if cell["temperature"] == 0]


def _survival(prefix: str, benches: dict[str, dict[str, Any]]) -> list[Point]:
    return [
        Point(f"{prefix}accept_rate_by_position/{bench}", rate, position)
        for bench, of_bench in benches.items()
        for position, rate in enumerate(of_bench["survival"], 1)
    ]


def _by_concurrency(report: dict[str, Any]) -> list[Point]:
    points = []
    for cell in _greedy(report):
        draft, of_set, at = cell["draft"], cell["set"], cell["concurrency"]
        prefix = "" if draft == OURS else f"{draft}/"
        points.append(Point(f"{prefix}speedup/{of_set}", cell["speedup"], at))
        points.append(Point(f"tokens_per_s/{of_set}/{draft}", cell["tokens_per_s"]["pooled"], at))
        if draft == OURS:
            points.append(Point(f"tokens_per_s/{of_set}/{BASELINE}", cell["baseline_tokens_per_s"]["pooled"], at))
    return points


def _foreign(report: dict[str, Any], draft: str) -> list[Point]:
    sets, draft_tokens = _sets(report, draft), report["drafts"][draft]["draft_tokens"]
    lengths = [
        Point(f"{draft}/accept_length/{name}", cell["accept_length"], draft_tokens) for name, cell in sets.items()
    ]
    return [*lengths, *_survival(f"{draft}/", sets)]


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
