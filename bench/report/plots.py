"""The report's plots, as SVG for a page: matplotlib draws, the page's CSS variables give the colours.

A vector plot of matplotlib is 10 KB and needs nothing from the network, where a script library would put 1 to 5 MB into
the page. Every colour is drawn as a placeholder and becomes `var(--name)` in the text, so that one plot serves light
and dark; text keeps the page's font; points have a title, which browsers show under the pointer. Inside the axes no
text is drawn, where it would lie on a line or under one: what a plot holds stands in its `legend`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from hipfire_kernels.errors import ToolchainUnavailable

INK, MUTED, GRID = "#fe0001", "#fe0002", "#fe0003"
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid"}
SERIES = 8
"""Colours of the page, `--s0` .. `--s7`; further series start over with another marker."""

MARKERS: Mapping[str, str] = {
    "o": "M10 5a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "s": "M10 2h6v6h-6z",
    "D": "M13 1l4 4-4 4-4-4z",
    "^": "M13 1l4 7h-8z",
    "v": "M13 9l4-7h-8z",
    "P": "M12 1h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "X": "M11 1l2 2 2-2 2 2-2 2 2 2-2 2-2-2-2 2-2-2 2-2-2-2z",
    "*": "M13.0 0.5L14.1 3.5L17.3 3.6L14.7 5.6L15.6 8.6L13.0 6.8L10.4 8.6L11.3 5.6L8.7 3.6L11.9 3.5z",
}
"""Markers as matplotlib names them, and each as a path in a legend's box of 26 by 10."""

MOST_TICKS = 6
"""Of so many places each has its tick, and those that are not too near another their label."""

NEAREST_TICKS = 0.12
"""Of an axis; labels nearer to one another would touch."""

WIDE = 1e4
"""A logarithmic axis that spans less has ticks between the powers of ten, which alone would be a label or two."""

_TIP = "tip:"
_SIZE = (4.0, 2.6)


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
        crossover: x from which on it is faster, whose point has a ring; None where there is none.
    """

    name: str
    index: int
    points: tuple[tuple[float, float], ...]
    tips: tuple[str, ...]
    spans: tuple[tuple[float, float], ...] = ()
    hollow: bool = False
    crossover: int | None = None


@dataclass(frozen=True)
class Plot:
    """What one plot shows.

    Attributes:
        title: above it.
        x, y: names of the axes, with their units.
        lines: the series.
        log: which axes are logarithmic, "x", "y" or "xy".
        levels: y at which lines are drawn, and what they are called together; empty for none.
        floor: points of a line below which nothing can be, and its name.
        band: a y range that is shaded, and its name.
        joined: whether the points of a series have a line between them.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: str = "x"
    levels: tuple[tuple[float, ...], str] = ((), "")
    floor: tuple[tuple[tuple[float, float], ...], str] | None = None
    band: tuple[tuple[float, float], str] | None = None
    joined: bool = True


@dataclass(frozen=True)
class Entry:
    """One entry of a legend.

    Attributes:
        kind: "series", "hollow", "dots" (without a line), "level", "floor" or "band".
        index: of the colour, for series.
        shape: path of the marker, for series.
    """

    kind: str
    text: str
    index: int = 0
    shape: str = ""


def legend(plot: Plot) -> list[Entry]:
    """What a plot holds, no more and no less: its series in the order of their indices, then lines and shades."""
    found = []
    for line in sorted(plot.lines, key=lambda line: line.index):
        kind = "hollow" if line.hollow else "series" if plot.joined else "dots"
        text = line.name if line.crossover is None else f"{line.name}, faster from {line.crossover:,} on"
        found.append(Entry(kind, text, line.index, MARKERS[marker(line.index)]))
    if plot.floor:
        found.append(Entry("floor", plot.floor[1]))
    if plot.levels[0]:
        found.append(Entry("level", plot.levels[1]))
    if plot.band:
        found.append(Entry("band", plot.band[1]))
    return found


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


def marker(index: int) -> str:
    """The marker of a series, as matplotlib names it."""
    return list(MARKERS)[(index + index // SERIES) % len(MARKERS)]


def draw(plot: Plot) -> str:
    """The plot as an `<svg>` element."""
    matplotlib = plotting()
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with matplotlib.rc_context(_style()):
        text = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure(plot))
        canvas.print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(text.getvalue(), plot.title)


def figure(plot: Plot) -> Any:
    """The plot as a figure of matplotlib's, in the style that is set."""
    from matplotlib.figure import Figure

    made = Figure(figsize=_SIZE, layout="constrained")
    axes = made.add_subplot()
    _frame(axes, plot)
    for line in plot.lines:
        _draw_line(axes, line, plot.joined)
    if plot.band:
        axes.axhspan(*plot.band[0], color=MUTED, alpha=0.2, linewidth=0, zorder=1)
    for level in plot.levels[0]:
        axes.axhline(level, color=INK, linewidth=1, zorder=1.5)
    if plot.floor:
        axes.plot(*zip(*plot.floor[0], strict=True), color=INK, linewidth=1.8, zorder=1.5)
    return made


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
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    if "y" in plot.log:
        axes.set_yscale("log")
        values = [y for line in plot.lines for _, y in line.points]
        values += [*plot.levels[0], *(y for _, y in (plot.floor or ((), ""))[0])]
        if max(values) < WIDE * min(values):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plain(y)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if "x" in plot.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        places = sorted({x for line in plot.lines for x, _ in line.points})
        if len(places) <= MOST_TICKS:
            named = _apart(places)
            axes.xaxis.set_major_locator(FixedLocator(named))
            axes.xaxis.set_minor_locator(FixedLocator([x for x in places if x not in named]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _apart(places: list[float]) -> list[float]:
    """Those of the places whose labels have room on a logarithmic axis, the outermost before those between."""
    kept: list[float] = []
    for place in [*places[:1], *places[:0:-1]]:
        if all(abs(math.log(place / other)) >= NEAREST_TICKS * math.log(places[-1] / places[0]) for other in kept):
            kept.append(place)
    return sorted(kept)


def plain(y: float) -> str:
    """A number as short as it can be read: 0.5, 20, 1e-5."""
    return re.sub(r"e([-+])0", r"e\1", f"{y:g}")


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
    colour = series_colour(line.index)
    xs, ys = zip(*line.points, strict=True)
    if line.spans:
        lows, highs = zip(*line.spans, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0)
    if joined:
        axes.plot(xs, ys, color=colour, linewidth=1.4, linestyle="--" if line.hollow else "-")
    for x, y, tip in zip(xs, ys, line.tips, strict=True):
        face = "none" if line.hollow else colour
        axes.plot([x], [y], marker(line.index), ms=5, color=colour, markerfacecolor=face, gid=_TIP + tip)
        if x == line.crossover:
            axes.plot([x], [y], "o", ms=10, color=colour, markerfacecolor="none", markeredgewidth=1.2)


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
