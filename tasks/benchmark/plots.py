"""Three pictures of a benchmark, each with its numbers beside it as CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from tasks.common.files import REPORTS, write_atomically

PLOTS = REPORTS / "plots"
_INK, _QUIET, _DRAFT, _PLAIN, _REST = "#1f2933", "#9aa5b1", "#0f7b6c", "#c3cdd6", "#eef2f5"


def write_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write rows that share their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def plot_survival(report: dict, folder: Path = PLOTS) -> Path:
    """Share of rounds that accept at least i draft tokens; the bars sum to AL - 1."""
    survival, settings = report["speculative"]["survival"], report["settings"]
    before = [1.0, *survival]
    write_csv(
        folder / "survival.csv",
        [
            {
                "position": i,
                "survival": share,
                "accepted_if_reached": round(share / before[i - 1], 4) if before[i - 1] else "",
            }
            for i, share in enumerate(survival, 1)
        ],
    )
    figure, axes = _figure(
        f"A round accepts {report['speculative']['accept_length'] - 1:.2f} of {settings['steps']} draft tokens",
        "Share of rounds in which draft tokens 1 to i are all accepted",
    )
    positions = range(1, len(survival) + 1)
    axes.bar(positions, [100] * len(survival), color=_REST, width=0.6)
    bars = axes.bar(positions, [100 * share for share in survival], color=_DRAFT, width=0.6)
    axes.bar_label(bars, fmt="%.0f %%", padding=4, color=_INK)
    axes.set(ylim=(0, 108), xlabel="draft position i", xticks=list(positions))
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    return _save(figure, folder / "survival.png")


def plot_accept_length_by_domain(report: dict, folder: Path = PLOTS) -> Path:
    """Acceptance length of each domain against all prompts pooled, and what training predicted."""
    rows = sorted(report["by_domain"], key=lambda row: row["accept_length"])
    pooled, predicted = report["speculative"]["accept_length"], report["predicted_accept_length"]
    write_csv(
        folder / "accept_length_by_domain.csv",
        [{"domain": row["domain"], "prompts": row["prompts"], "accept_length": row["accept_length"]} for row in rows]
        + [{"domain": "all", "prompts": report["settings"]["prompts"], "accept_length": pooled}],
    )
    figure, axes = _figure(
        f"Acceptance length {pooled:.2f} of at most {report['settings']['steps'] + 1}",
        "Tokens a verification round yields; 1 is no draft token accepted",
        height=1.9 + 0.38 * len(rows),
    )
    most = report["settings"]["steps"] + 1
    axes.barh(
        [row["domain"] for row in rows], [row["accept_length"] - 1 for row in rows], left=1, color=_DRAFT, height=0.6
    )
    for number, row in enumerate(rows):
        long_enough = row["accept_length"] - 1 > 0.1 * (most - 1)
        _write_at_base(axes, 1, number, f"{row['accept_length']:.2f}", "white" if long_enough else _INK)
    axes.axvline(pooled, color=_INK, linewidth=1.2, label=f"all prompts, served: {pooled:.2f}")
    axes.axvline(
        predicted, color=_QUIET, linewidth=1.2, linestyle="--", label=f"predicted in training: {predicted:.2f}"
    )
    axes.set(xlim=(1, most))
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, borderaxespad=0, handlelength=1.4)
    return _save(figure, folder / "accept_length_by_domain.png")


def plot_throughput(report: dict, prompts: Sequence[dict], folder: Path = PLOTS) -> Path:
    """Tokens per second of both servers, each prompt a dot."""
    arms = [("speculative", "with the draft", _DRAFT), ("baseline", "plain", _PLAIN)]
    low, high = report["speedup_interval"]
    write_csv(
        folder / "throughput.csv",
        [{"server": arm, "tokens_per_s": report[arm]["tokens_per_s"]} for arm, _, _ in reversed(arms)],
    )
    figure, axes = _figure(
        f"{report['speedup']:.2f} times the plain server (95 %: {low:.2f} to {high:.2f})",
        f"Tokens per second, one request at a time, {report['settings']['prompts']} prompts; a dot is a prompt",
        height=2.6,
    )
    speeds = [report[arm]["tokens_per_s"] for arm, _, _ in arms]
    axes.barh([name for _, name, _ in arms], speeds, color=[color for _, _, color in arms], height=0.55)
    for row, (arm, _, _) in enumerate(arms):
        dots = [prompt[f"{arm}_tokens_per_s"] for prompt in prompts]
        heights = [row + 0.36 * ((number * 0.618) % 1 - 0.5) for number in range(len(dots))]
        axes.scatter(dots, heights, s=12, color=_INK, alpha=0.45, linewidths=0, zorder=3)
        _write_at_base(axes, 0, row, f"{speeds[row]:.1f}", "white" if arm == "speculative" else _INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, None)
    return _save(figure, folder / "throughput.png")


def _write_at_base(axes, left: float, row: int, text: str, color: str) -> None:
    axes.annotate(text, (left, row), xytext=(6, 0), textcoords="offset points", va="center", color=color, weight="bold")


def _figure(title: str, subtitle: str, height: float = 3.4):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "text.color": _INK,
            "axes.edgecolor": _QUIET,
            "axes.labelcolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    )
    figure, axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")
    axes.set_title(title, loc="left", weight="bold", fontsize=12.5, pad=28)
    axes.annotate(
        subtitle, (0, 1), xytext=(0, 11), xycoords="axes fraction", textcoords="offset points", color="#52606d"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    # No version and no date in the file: the same numbers give the same bytes.
    figure.savefig(path, dpi=160, metadata={"Software": None})
    pyplot.close(figure)
    return path
