"""The plots of a benchmark, each with its numbers beside it as CSV."""

from pathlib import Path

from tasks.benchmark.curves import plot_latency, plot_speedup
from tasks.benchmark.drawing import (
    INK,
    PLAIN,
    PLOTS,
    QUIET,
    REST,
    Plot,
    legend_below,
    new_figure,
    save,
    style_of,
    write_csv,
)
from tasks.benchmark.rows import by_draft
from tasks.benchmark.wording import label, number, of_ours, requests
from tasks.common.benchmark_names import BASELINE, OURS

# Bars beyond which a number on each would touch the next.
_MOST_LABELLED = 12


def plot_all(report: dict, folder: Path = PLOTS) -> list[Plot]:
    """Draw all that these results can show, in a reader's order; `left_out` says what they cannot."""
    by_concurrency = [] if left_out(report) else [plot_speedup, plot_latency]
    return [
        draw(report, folder) for draw in (*by_concurrency, plot_survival, plot_accept_length_by_domain, plot_throughput)
    ]


def left_out(report: dict) -> str:
    """Which plots there are none of and why, as a sentence; empty where all are drawn."""
    concurrency = report["settings"]["concurrency"]
    if len(concurrency) > 1:
        return ""
    return (
        f"Speed-up by concurrency and latency against throughput are not drawn: only {requests(concurrency[0])} was "
        "measured. More values in benchmark.concurrency of params.yaml draw them."
    )


def plot_survival(report: dict, folder: Path = PLOTS) -> Plot:
    """Share of rounds that accept at least i draft tokens; of one draft the bars sum to AL - 1."""
    drafts = {draft: cells[0]["survival"] for draft, cells in by_draft(report).items()}
    write_csv(
        folder / "survival.csv",
        [
            {
                "draft": draft,
                "position": i,
                "survival": share,
                "accepted_if_reached": round(share / before, 4) if before else "",
            }
            for draft, survival in drafts.items()
            for i, (before, share) in enumerate(zip([1.0, *survival[:-1]], survival, strict=True), 1)
        ],
    )
    figure, axes = new_figure()
    style, width = style_of(list(drafts)), 0.6 if len(drafts) == 1 else 0.84 / len(drafts)
    steps = report["settings"]["steps"]
    for place, (draft, survival) in enumerate(drafts.items()):
        at = [i + (place - (len(drafts) - 1) / 2) * width for i in range(1, steps + 1)]
        if len(drafts) == 1:
            axes.bar(at, [100] * steps, color=REST, width=width)
        bars = axes.bar(
            at,
            [100 * share for share in survival],
            color=style[draft][0],
            width=width if len(drafts) == 1 else 0.94 * width,
            label=label(draft),
        )
        if steps * len(drafts) <= _MOST_LABELLED:
            axes.bar_label(bars, fmt="%.0f %%", padding=3, color=INK, fontsize=10 if len(drafts) < 3 else 9)
    highest = 100 if len(drafts) == 1 else 100 * max(map(max, drafts.values()))
    axes.set(ylim=(0, 1.1 * highest), xlabel="draft position i", xticks=range(1, steps + 1))
    if steps * len(drafts) <= _MOST_LABELLED:
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
    else:
        axes.set_ylabel("%")
        axes.grid(axis="y", color=REST)
    axes.tick_params(axis="x", length=0)
    if len(drafts) > 1:
        legend_below(figure)
    return save(
        figure,
        axes,
        folder / "survival.png",
        of_ours(
            report,
            f"A round accepts {report['speculative']['accept_length'] - 1:.2f} of at most {steps} draft tokens",
        ),
        "Share of rounds in which draft tokens 1 to i are all accepted",
    )


def plot_accept_length_by_domain(report: dict, folder: Path = PLOTS) -> Plot:
    """Acceptance length of each domain against all prompts pooled, and what training predicted."""
    rows = sorted(report["by_domain"], key=lambda row: row["accept_length"])
    pooled, predicted = report["speculative"]["accept_length"], report["predicted_accept_length"]
    most = report["settings"]["steps"] + 1
    write_csv(
        folder / "accept_length_by_domain.csv",
        [{"domain": row["domain"], "prompts": row["prompts"], "accept_length": row["accept_length"]} for row in rows]
        + [{"domain": "all", "prompts": report["settings"]["prompts"], "accept_length": pooled}],
    )
    figure, axes = new_figure(height=2.1 + 0.38 * len(rows))
    style = style_of([])
    axes.barh(
        [row["domain"] for row in rows],
        [row["accept_length"] - 1 for row in rows],
        left=1,
        color=style[OURS][0],
        height=0.6,
    )
    for place, row in enumerate(rows):
        long_enough = row["accept_length"] - 1 > 0.15 * (most - 1)
        _write_at_base(axes, 1, place, f"{row['accept_length']:.2f}", "white" if long_enough else INK)
    axes.axvline(pooled, color=INK, linewidth=1.2, label=f"all prompts, served: {pooled:.2f}")
    if predicted is not None:
        axes.axvline(
            predicted, color=QUIET, linewidth=1.2, linestyle="--", label=f"predicted in training: {predicted:.2f}"
        )
    axes.set(xlim=(1, most))
    axes.tick_params(axis="y", length=0)
    legend_below(figure)
    return save(
        figure,
        axes,
        folder / "accept_length_by_domain.png",
        of_ours(report, f"Acceptance length {pooled:.2f} of at most {most}"),
        "Tokens a verification round yields; 1 is no draft token accepted",
    )


def plot_throughput(report: dict, folder: Path = PLOTS) -> Plot:
    """Tokens per second of every server at the lowest concurrency, with the slowest and the fastest repeat."""
    drafts = {draft: cells[0] for draft, cells in by_draft(report).items()}
    speeds = {draft: cell["tokens_per_s"] for draft, cell in drafts.items()}
    speeds[BASELINE] = drafts[OURS]["baseline_tokens_per_s"]
    concurrency = drafts[OURS]["concurrency"]
    write_csv(
        folder / "throughput.csv",
        [{"server": arm, "concurrency": concurrency, **speed} for arm, speed in speeds.items()],
    )
    figure, axes = new_figure(height=1.7 + 0.45 * len(speeds))
    style = style_of(list(drafts)) | {BASELINE: (PLAIN, "o")}
    longest = max(speed["pooled"] for speed in speeds.values())
    for row, (arm, speed) in enumerate(reversed(speeds.items())):
        axes.barh(label(arm), speed["pooled"], color=style[arm][0], height=0.55)
        axes.plot([speed["min"], speed["max"]], [row, row], color=INK, linewidth=1.4, marker="|", markersize=8)
        white = arm != BASELINE and speed["pooled"] > 0.2 * longest
        _write_at_base(axes, 0, row, number(speed["pooled"]), "white" if white else INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    low, high = report["speedup_interval"]
    return save(
        figure,
        axes,
        folder / "throughput.png",
        of_ours(report, f"{report['speedup']:.2f} times the plain server (95 %: {low:.2f} to {high:.2f})"),
        f"Tokens per second, {requests(concurrency)}; whiskers span the repeats",
    )


def _write_at_base(axes, left: float, row: int, text: str, color: str) -> None:
    axes.annotate(text, (left, row), xytext=(6, 0), textcoords="offset points", va="center", color=color, weight="bold")
