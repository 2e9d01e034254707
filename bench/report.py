"""One self-contained HTML page from result files: no network, light and dark, from file:// as well.

`report_data` reads and names the parts, `report_sections` and `report_routes` fill them, `report_plots` draws, and
`report.html.j2` lays the page out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hipfire_kernels import __version__
from hipfire_kernels.bench import report_plots
from hipfire_kernels.bench.report_data import Document, Results, read
from hipfire_kernels.bench.report_plots import Plot
from hipfire_kernels.bench.report_routes import route_map
from hipfire_kernels.bench.report_sections import sections
from hipfire_kernels.errors import InputError

LAST = ("ab", "parity", "fuzz")
"""Parts that come behind the route map."""


def page(files: Sequence[Path], against: Path | None = None, title: str = "hipfire-kernels results") -> str:
    """The page, as text.

    Args:
        files: of `hfk bench`, `qualify`, `ab`, `fuzz`, `build --json`, and of `bench.on_device`, in any order.
        against: an earlier `hfk build --json`, for what changed since.
        title: of the page.

    Raises:
        InputError: a file cannot be read, or none is of a kind that a report shows.
        ToolchainUnavailable: matplotlib is not installed.
    """
    report_plots.plotting()
    results = read(files)
    if not results.names:
        raise InputError(f"none of {', '.join(results.passed_over) or 'no files'} is a result that a report shows")
    parts = [*sections(results, _earlier(against)), route_map()]
    parts.sort(key=lambda part: part.id in LAST)
    template = resources.files("hipfire_kernels.bench") / "report.html.j2"
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        about=_about(results),
        sections=parts,
        colours=report_plots.SERIES,
        draw=lambda plot: Markup(report_plots.draw(plot)),  # markup of its own making, its texts escaped
        legend=_legend,
        footer=_footer(results),
    )


def _earlier(file: Path | None) -> Document | None:
    if file is None:
        return None
    builds = read([file]).builds
    if not builds:
        raise InputError(f"{file} is no build report; required: what hfk build --json wrote")
    return builds[0]


def _legend(plots: Iterable[Plot]) -> dict[str, tuple[int, bool]]:
    return report_plots.names([line for plot in plots for line in plot.lines])


def _about(results: Results) -> list[str]:
    """A line for each device that something was measured on, and when."""
    lines = []
    for document in (*results.tables, *results.peers):
        facts = [document.get("name"), f"driver {document['driver']}" if document.get("driver") else None]
        lines.append(", ".join(str(f) for f in (*facts, document.get("compiler"), document.get("date")) if f))
    for run in results.runs:
        machine = run.get("pinned", {}).get("machine", {})
        lines.append(", ".join(str(f) for f in (machine.get("device"), machine.get("driver"), run["date"][:10]) if f))
    return list(dict.fromkeys(line for line in lines if line))


def _footer(results: Results) -> str:
    shown = f"Written by hipfire-kernels {__version__} from {', '.join(dict.fromkeys(results.names))}."
    left = f" Not shown, of no kind that it knows: {', '.join(results.passed_over)}." if results.passed_over else ""
    return shown + left
