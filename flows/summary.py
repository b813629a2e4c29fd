"""What a run says at its end, from the reports of the stages that it brought up to date."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tasks.benchmark.rows import by_draft
from tasks.benchmark.wording import number, requests
from tasks.common.benchmark_names import OURS
from tasks.common.files import ARTIFACTS, REPORTS, read_json
from tasks.common.params import Params
from tasks.common.training_report import predicted_accept_length


class StageResult(NamedTuple):
    """How a stage ended; `state` is Prefect's ('Completed', 'Cached', 'Failed', 'TimedOut')."""

    stage: str
    state: str
    seconds: float


class PipelineResult(NamedTuple):
    """A run that reached its end; `run` names it in Prefect and in MLflow."""

    run: str
    stages: list[StageResult]


def benchmark_rows() -> list[dict[str, Any]]:
    """The benchmark by domain as rows of a table, all prompts first."""
    report = read_json(REPORTS / "benchmark.json")
    served, settings = report["speculative"], report["settings"]
    pooled = {"domain": "all", "prompts": settings["prompts"], **served, "speedup": report["speedup"]}
    columns = ("domain", "prompts", "accept_length", "tokens_per_s", "speedup")
    return [{column: row.get(column) for column in columns} for row in (pooled, *report["by_domain"])]


def print_summary(result: PipelineResult, params: Params) -> None:
    """Print where the time went, what was reached and where to look."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    stages = Table("stage", "", "time", box=None, header_style="dim", padding=(0, 2))
    stages.columns[2].justify = "right"
    for stage in result.stages:
        cached = stage.state == "Cached"
        stages.add_row(
            stage.stage, "[dim]cached[/]" if cached else "[green]done[/]", "" if cached else _duration(stage.seconds)
        )
    stages.add_row("[bold]all[/]", "", _duration(sum(stage.seconds for stage in result.stages)))
    facts = Table(box=None, show_header=False, padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in _facts([stage.stage for stage in result.stages], params):
        facts.add_row(name, value)
    at = "make ui" if params.tracking.uri.startswith("sqlite") else params.tracking.uri
    facts.add_row("MLflow", f"{at}, then 'Model training', run {result.run}")
    console = Console(highlight=False)
    console.print()
    console.print(stages)
    console.print(Panel(facts, title=f"[bold]{result.run}[/]", title_align="left", border_style="green", expand=False))
    console.print(
        f"The next run writes over {REPORTS}/: git add dvc.lock params.yaml {REPORTS} && git commit", soft_wrap=True
    )


def _facts(stages: list[str], params: Params) -> Iterator[tuple[str, str]]:
    if "benchmark" in stages:
        report = read_json(REPORTS / "benchmark.json")
        served, settings = report["speculative"], report["settings"]
        predicted = report["predicted_accept_length"]  # of the held-out prompts, where these were asked
        yield (
            "acceptance length",
            f"[bold green]{served['accept_length']:.2f}[/] of at most {settings['steps'] + 1}"
            + (f", {predicted:.2f} predicted" if predicted else ""),
        )
        cells = by_draft(report)[OURS]
        for name, cell in zip(("speed", ""), (cells[0], *cells[1:][-1:]), strict=False):  # fewest and most at once
            (low, high), speeds = cell["speedup_interval"], (cell["tokens_per_s"], cell["baseline_tokens_per_s"])
            against = " against ".join(number(speed["pooled"]) for speed in speeds)
            yield name, f"[bold green]{cell['speedup']:.2f}[/] times the plain server (95 %: {low:.2f} to {high:.2f})"
            yield "", f"{against} tokens/s, {requests(cell['concurrency'])}"
        yield (
            "lossless",
            f"[green]yes[/], greedy text is the same on {settings['prompts']} prompts"
            if report["lossless"]
            else "[red]no[/], see first_difference in reports/benchmark.json",
        )
    elif "train_draft" in stages:
        yield "acceptance length", f"{predicted_accept_length(params.serve.num_steps):.2f} predicted"
    if gates := [stage.removeprefix("gate_") for stage in stages if stage.startswith("gate_")]:
        failed = [gate for gate in gates if not read_json(REPORTS / "gates" / f"{gate}.json")["passed"]]
        yield (
            "gates",
            f"[red]failed: {', '.join(failed)}[/]" if failed else f"[green]{len(gates)} of {len(gates)} passed[/]",
        )
    if "benchmark" in stages:
        yield "reports", f"{REPORTS}/benchmark.html, and of every gate a page in {REPORTS}/gates"
    elif gates:
        yield "reports", f"{REPORTS}/gates/{gates[-1]}.html and all of {REPORTS}/"
    if "export_draft" in stages:
        yield "draft", str(ARTIFACTS / "export")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
