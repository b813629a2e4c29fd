"""The tables that people read: on a terminal, and in a log without colour."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.common.check_table import print_checks
from tasks.common.console import console as default_console
from tasks.verify_environment.report import Plan, Report


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the checks, what to do about those that are not ok, and the plan."""
    console = console or default_console()
    print_checks(report.checks, console)
    _print_sources(console, report.plan)
    if report.plan.stages:
        console.print(_stages(report.plan))
        _print_footnote(console, report.machine)
    else:
        console.print("\nNo estimate: the target, its aux layers or the speed of the device are not known.")


def _print_sources(console: Console, plan: Plan) -> None:
    for split in dict.fromkeys(source.split for source in plan.sources):
        files = [source for source in plan.sources if source.split == split]
        prompts, tokens = sum(f.prompts for f in files), sum(f.tokens for f in files)
        text = f"{prompts:,} {split} prompts, about {tokens:,} tokens, in {len(files)} files of {plan.folder}"
        console.print(Text(text))
    console.print(Text(", ".join(f"{name} {_value(value)}" for name, value in plan.settings.items())))


def _stages(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("tokens", "time", "disk", "GPU hours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("estimated from", overflow="fold")
    for stage in plan.stages:
        table.add_row(
            stage.stage,
            f"{stage.tokens:,}" if stage.tokens else "",
            _duration(stage.seconds),
            _size(stage.disk_bytes) if stage.disk_bytes else "",
            f"{stage.gpu_hours:.2f}" if stage.gpus else "",
            Text(stage.basis),
        )
    table.add_section()
    gpu_hours = f"{plan.gpu_hours:.2f}" if plan.gpu_hours else ""
    disk = _size(sum(need.wanted for need in plan.disk))
    note = "; ".join(f"{need.what}; {_size(need.free)} free at {need.folder}" for need in plan.disk)
    table.add_row("in all", "", _duration(plan.seconds), disk, gpu_hours, Text(note))
    return table


def _print_footnote(console: Console, machine: dict) -> None:
    load, cores = machine["load_average"][0], machine["cores"]
    if load > cores:
        console.print(f"Measured under a load of {load} on {cores} cores; on an idle machine it takes less.")
    console.print(
        "Estimates: tokens and disk are upper bounds, times may be off by a factor of 2 (GPU: 3). "
        "See infra/docs/environment.md."
    )


def _value(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(size: float) -> str:
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
