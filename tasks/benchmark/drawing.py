"""How the plots look and what becomes of one: a PNG for a slide, its numbers as CSV, an SVG for the page."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.common.benchmark_names import BASELINE, OURS
from tasks.common.files import REPORTS, replacing, write_atomically

PLOTS = REPORTS / "plots"
INK, QUIET, REST, PLAIN = "#1f2933", "#7b8794", "#eef2f5", "#b4c0cb"
_SOFT, _TEAL = "#52606d", "#0f7b6c"
_OTHERS = ("#c2571a", "#5b4bb0", "#2f6db5", "#b03060", "#7a6a00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
# The page gives these colours a second value for dark screens.
COLOURS = {
    INK: "ink", QUIET: "quiet", REST: "rest", PLAIN: "plain", _TEAL: "own", **{c: f"other{n}" for n, c in enumerate(_OTHERS)}
}  # fmt: skip
# Inches; on the page a plot takes half the width and its title is text of the page.
_WIDTH, _PAGE_WIDTH, _TITLE_HEIGHT = 6.4, 5.0, 0.6


@dataclass(frozen=True)
class Plot:
    """One plot that was written.

    Attributes:
        title: what it shows, as a finding.
        about: what is drawn.
        svg: without the title, to be set into a page: no size, no white ground, colours by name.
    """

    title: str
    about: str
    png: Path
    svg: str


def write_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write rows that share their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def style_of(arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each server; drafts that are not the exported one take theirs in turn."""
    others = [arm for arm in arms if arm not in (OURS, BASELINE)]
    return {OURS: (_TEAL, _MARKERS[0]), BASELINE: (QUIET, "o")} | {
        arm: (_OTHERS[n % len(_OTHERS)], _MARKERS[1 + n % (len(_MARKERS) - 1)]) for n, arm in enumerate(others)
    }


def new_figure(height: float = 3.4):
    """Figure and axes of the plots' size in inches, title included, without ornament."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": QUIET,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "text.parse_math": False,  # a domain may be named after dollars
            "svg.fonttype": "none",
            "svg.hashsalt": "draftline",
        }
    )
    figure, axes = pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def legend_below(figure) -> None:
    entries = sum(len(axes.get_legend_handles_labels()[0]) for axes in figure.axes)
    figure.legend(loc="outside lower left", ncols=entries if entries < 4 else 2, handlelength=1.6, columnspacing=1.6)


def concurrency_axis(axes, values: Sequence[int]) -> None:
    """Doublings at equal distances, a tick for each value measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel("requests at once")


def save(figure, axes, path: Path, title: str, about: str) -> Plot:
    """Write the PNG with its title above, and take the SVG without it."""
    from matplotlib import pyplot

    heading = axes.set_title(title, loc="left", weight="bold", fontsize=12.5, pad=28)
    above = axes.annotate(
        about, (0, 1), xytext=(0, 11), xycoords="axes fraction", textcoords="offset points", color=_SOFT
    )
    above.set_in_layout(False)  # the title keeps the room; a long line must not make the axes narrow
    figure.draw_without_rendering()
    for text in (heading, above):
        room = (figure.bbox.width - text.get_window_extent().x0) / text.get_window_extent().width
        text.set_fontsize(text.get_fontsize() * min(1, 0.94 * room))  # letters do not grow quite evenly
    # No version and no date in the files: the same numbers give the same bytes.
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=160, metadata={"Software": None})
    axes.set_title("", loc="left")
    above.remove()
    figure.set_size_inches(_PAGE_WIDTH, figure.get_figheight() - _TITLE_HEIGHT)
    drawn = io.StringIO()
    figure.savefig(
        drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    pyplot.close(figure)
    return Plot(title, about, path, _inline(drawn.getvalue(), path.stem))


def _inline(svg: str, name: str) -> str:
    """Of a file's SVG what stands in a page: ids of its own, the page's colours and width."""
    svg = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]+"', svg).group()
    svg = re.sub(r"<svg[^>]*>", f'<svg {box} aria-hidden="true">', svg, count=1)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg
