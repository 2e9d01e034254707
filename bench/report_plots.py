"""The report's plots, as SVG for a page: matplotlib draws, the page's CSS variables give the colours.

A vector plot of matplotlib is 10 KB and needs nothing from the network, where a script library would put 1 to 5 MB into
the page. Every colour is drawn as a placeholder and becomes `var(--name)` in the text, so that one plot serves light
and dark; text keeps the page's font; points have a title, which browsers show under the pointer.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from hipfire_kernels.errors import ToolchainUnavailable

INK, MUTED, GRID = "#fe0001", "#fe0002", "#fe0003"
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid"}
SERIES = 8
"""Colours of the page, `--s0` .. `--s7`; further series start over with another marker."""

MARKERS = "osD^vPX*"
MOST_TICKS = 6
"""Of so many places each has its tick."""

WIDE = 1e4
"""A logarithmic axis that spans less has ticks between the powers of ten, which alone would be a label or two."""

_TIP = "tip:"
_SIZE = (4.4, 2.9)


@dataclass(frozen=True)
class Line:
    """One series of a plot.

    Attributes:
        name: in words.
        index: of its colour and marker, the same in all plots of a page.
        points: x and y.
        spans: low and high of each point, or empty.
        tips: what each point says under the pointer.
        hollow: a series to compare with, not one of the project's own.
    """

    name: str
    index: int
    points: tuple[tuple[float, float], ...]
    tips: tuple[str, ...]
    spans: tuple[tuple[float, float], ...] = ()
    hollow: bool = False


@dataclass(frozen=True)
class Plot:
    """What one plot shows.

    Attributes:
        title: above it.
        x, y: names of the axes.
        lines: the series.
        log: which axes are logarithmic, "x", "y" or "xy".
        levels: y at which lines are drawn, and their names.
        marks: x positions, with a label and the index of the series they belong to.
        floor: points of a line below which nothing can be, and its name.
        band: a y range that is shaded.
        joined: whether the points of a series have a line between them.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: str = "x"
    levels: tuple[tuple[float, str], ...] = ()
    marks: tuple[tuple[float, str, int], ...] = ()
    floor: tuple[tuple[tuple[float, float], ...], str] | None = None
    band: tuple[float, float] | None = None
    joined: bool = True


def plotting() -> Any:
    """matplotlib, set up for SVG.

    Raises:
        ToolchainUnavailable: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ToolchainUnavailable(
            f"matplotlib is not importable ({error}); the report's plots need it: install hipfire-kernels[bench]"
        ) from None
    return matplotlib


def series_colour(index: int) -> str:
    """The placeholder of a series' colour."""
    return f"#fe01{index % SERIES:02x}"


def draw(plot: Plot) -> str:
    """The plot as an `<svg>` element."""
    matplotlib = plotting()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        _frame(axes, plot)
        for line in plot.lines:
            _draw_line(axes, line, plot.joined)
        _annotate(axes, plot)
        text = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(text.getvalue(), plot.title)


def _style() -> Mapping[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }


def _frame(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    counts, plain = FuncFormatter(lambda x, _: short(x)), FuncFormatter(lambda y, _: f"{y:g}")

    axes.set_title(plot.title, fontsize=9.5, loc="left")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    if "y" in plot.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
        values = [y for line in plot.lines for _, y in line.points]
        if max(values) < WIDE * min(values):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if "x" in plot.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(counts)
        axes.xaxis.set_minor_formatter(NullFormatter())
        places = sorted({x for line in plot.lines for x, _ in line.points})
        if len(places) <= MOST_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(places))
            axes.xaxis.set_minor_locator(NullLocator())


def short(x: float) -> str:
    """A number in few characters: 2048 is 2K, 20676 is 20.7K (thousands, where it is no multiple of 1024)."""
    for step, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if x >= step and x % step == 0:
            return f"{x / step:g}{suffix}"
    for size, suffix in ((1e6, "M"), (1e3, "K")):
        if x >= size:
            return f"{x / size:.3g}{suffix}"
    return f"{x:.3g}"


def _draw_line(axes: Any, line: Line, joined: bool) -> None:
    colour, marker = series_colour(line.index), MARKERS[(line.index + line.index // SERIES) % len(MARKERS)]
    xs, ys = zip(*line.points, strict=True)
    if line.spans:
        lows, highs = zip(*line.spans, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0)
    if joined:
        axes.plot(xs, ys, color=colour, linewidth=1.4, linestyle="--" if line.hollow else "-")
    for x, y, tip in zip(xs, ys, line.tips, strict=True):
        face = "none" if line.hollow else colour
        axes.plot([x], [y], marker, ms=5, color=colour, markerfacecolor=face, gid=_TIP + tip)


def _annotate(axes: Any, plot: Plot) -> None:
    if plot.band:
        axes.axhspan(*plot.band, color=MUTED, alpha=0.15, linewidth=0)
    for value, name in plot.levels:
        axes.axhline(value, color=INK, linewidth=1)
        axes.annotate(
            name, (1, value), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha="right"
        )
    if plot.marks:  # room for their labels above the lines
        low, high = axes.get_ylim()
        share = 0.1 + 0.08 * len(plot.marks)
        axes.set_ylim(low, high * (high / low) ** share if "y" in plot.log else high + share * (high - low))
    for number, (x, name, index) in enumerate(plot.marks):
        axes.axvline(x, color=series_colour(index), linewidth=1, linestyle=":")
        axes.annotate(
            name,
            (x, 1 - 0.085 * number),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            color=series_colour(index),
        )
    if plot.floor:
        points, name = plot.floor
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=INK, linewidth=1.6)
        axes.annotate(name, (0.99, 0.03), xycoords="axes fraction", ha="right", va="bottom")


def _for_page(svg: str, title: str) -> str:
    """The element alone, its placeholders replaced, sized by the page, points with titles, no ids but those used."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head = f'<svg role="img" aria-label="{escape(title, {chr(34): "&quot;"})}" viewBox="\\1">'
    svg = re.sub(r'<svg [^>]*viewBox="([^"]+)"[^>]*>', head, svg, count=1)
    svg = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"<style.*?</style>| font-family: [^;\"]*;", "", svg, flags=re.DOTALL)
    for colour, name in {**_NAMES, **{series_colour(i): f"s{i}" for i in range(SERIES)}}.items():
        svg = svg.replace(colour, f"var(--{name})")
    return re.sub(r"\s*\n\s*", " ", svg).strip()


def names(lines: Sequence[Line]) -> dict[str, tuple[int, bool]]:
    """Index and hollowness of each series, in the order of the indices: for a legend."""
    return {line.name: (line.index, line.hollow) for line in sorted(lines, key=lambda line: line.index)}
