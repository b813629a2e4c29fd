"""What changes with the requests at once: speed-up, and latency against throughput."""

from collections.abc import Sequence
from pathlib import Path

from tasks.benchmark.drawing import (
    PLOTS,
    QUIET,
    REST,
    Plot,
    concurrency_axis,
    legend_below,
    new_figure,
    save,
    style_of,
    write_csv,
)
from tasks.benchmark.rows import by_draft
from tasks.benchmark.wording import label, ms, of_ours, requests
from tasks.common.benchmark_names import BASELINE, OURS


def plot_speedup(report: dict, folder: Path = PLOTS) -> Plot:
    """A line a draft over the requests at once, its 95 % interval as a band; the plain server is the line at 1."""
    drafts = by_draft(report)
    write_csv(
        folder / "speedup_by_concurrency.csv",
        [
            {
                "draft": draft,
                "concurrency": cell["concurrency"],
                "speedup": cell["speedup"],
                "low": cell["speedup_interval"][0],
                "high": cell["speedup_interval"][1],
            }
            for draft, cells in drafts.items()
            for cell in cells
        ],
    )
    figure, axes = new_figure(height=3.6)
    style = style_of(list(drafts))
    for draft, cells in drafts.items():
        color, marker = style[draft]
        at, speedups = [cell["concurrency"] for cell in cells], [cell["speedup"] for cell in cells]
        low, high = zip(*(cell["speedup_interval"] for cell in cells), strict=True)
        axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(at, speedups, color=color, marker=marker, markersize=5, linewidth=1.8, label=label(draft))
        if len(drafts) == 1:
            for x, y in zip(at, speedups, strict=True):
                axes.annotate(f"{y:.2f}", (x, y), xytext=(0, 8), textcoords="offset points", ha="center", weight="bold")
    axes.axhline(1, color=QUIET, linewidth=1.2, linestyle="--", label=label(BASELINE))
    concurrency_axis(axes, [cell["concurrency"] for cell in drafts[OURS]])
    axes.set_ylabel("times the plain server")
    axes.grid(axis="y", color=REST)
    axes.margins(x=0.07, y=0.14)
    legend_below(figure)
    first, last = drafts[OURS][0], drafts[OURS][-1]
    return save(
        figure,
        axes,
        folder / "speedup_by_concurrency.png",
        of_ours(
            report,
            f"{first['speedup']:.2f} times at concurrency {first['concurrency']}, "
            f"{last['speedup']:.2f} at {last['concurrency']}",
        ),
        "Speed-up by requests at once; the band is the 95 % interval",
    )


def plot_latency(report: dict, folder: Path = PLOTS) -> Plot:
    """A line a server, a point a concurrency: to the right more tokens for all, below less waiting for each."""
    drafts = by_draft(report)
    drafts = {draft: [c for c in cells if c["stream_tokens_per_s"]] for draft, cells in drafts.items()}
    arms = {draft: [_point(c, "tokens_per_s", "stream_tokens_per_s") for c in cells] for draft, cells in drafts.items()}
    arms[BASELINE] = [_point(c, "baseline_tokens_per_s", "baseline_stream_tokens_per_s") for c in drafts[OURS]]
    write_csv(
        folder / "latency_against_throughput.csv",
        [{"server": arm, **point} for arm, points in arms.items() for point in points],
    )
    figure, axes = new_figure(height=3.6)
    style = style_of(list(drafts))
    for arm, points in arms.items():
        color, marker = style[arm]
        across, up = [p["tokens_per_s"] for p in points], [p["ms_a_token"] for p in points]
        dashes = "--" if arm == BASELINE else "-"
        axes.plot(across, up, dashes, color=color, marker=marker, markersize=5, linewidth=1.6, label=label(arm))
    for of_both in zip(arms[OURS], arms[BASELINE], strict=True):
        lower = min(of_both, key=lambda point: point["ms_a_token"])
        for arm, point in zip((OURS, BASELINE), of_both, strict=True):
            _write_beside(axes, point, style[arm][0], below=point is lower)
    for axis, name in ((axes.xaxis, "tokens_per_s"), (axes.yaxis, "ms_a_token")):
        _scale(axis, [point[name] for points in arms.values() for point in points])
    axes.set(xlabel="tokens per second, all requests together", ylabel="ms a token, for one reader")
    axes.grid(color=REST)
    axes.margins(0.1)
    legend_below(figure)
    own, plain = arms[OURS][0], arms[BASELINE][0]
    return save(
        figure,
        axes,
        folder / "latency_against_throughput.png",
        of_ours(
            report,
            f"A token every {ms(own['ms_a_token'])} ms instead of {ms(plain['ms_a_token'])}, "
            f"{requests(own['concurrency'])}",
        ),
        "Time a token of one answer against throughput; numbers are requests at once",
    )


def _point(cell: dict, speed: str, stream: str) -> dict:
    return {
        "concurrency": cell["concurrency"],
        "tokens_per_s": cell[speed]["pooled"],
        "ms_a_token": round(1000 / cell[stream], 2),  # of an answer: tokens of a round come together
    }


def _write_beside(axes, point: dict, color: str, below: bool) -> None:
    """The concurrency at its point, away from the other server's."""
    axes.annotate(
        str(point["concurrency"]),
        (point["tokens_per_s"], point["ms_a_token"]),
        xytext=(3, -5) if below else (-3, 5),
        textcoords="offset points",
        ha="left" if below else "right",
        va="top" if below else "bottom",
        fontsize=9,
        color=color,
    )


def _scale(axis, values: Sequence[float]) -> None:
    """Logarithmic where the values spread wide, so that the small ones do not lie on one another."""
    from matplotlib.ticker import LogLocator

    if max(values) > 5 * min(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(LogLocator(subs=()))
    axis.set_major_formatter("{x:,.10g}")
