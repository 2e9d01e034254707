"""The page: its parts in order, what stands above and below them, laid out by `page.html.j2`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hipfire_kernels import __version__
from hipfire_kernels.bench.report import curves, plots, records, runs
from hipfire_kernels.bench.report.parts import Section, Series, compiler, grouped
from hipfire_kernels.bench.report.results import Document, Results, read
from hipfire_kernels.bench.report.route_map import route_map
from hipfire_kernels.dispatch.routes import routes_of
from hipfire_kernels.errors import InputError


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
    plots.plotting()
    results = read(files)
    if not results.names:
        raise InputError(f"none of {', '.join(results.passed_over) or 'no files'} is a result that a report shows")
    template = resources.files("hipfire_kernels.bench.report") / "page.html.j2"
    environment = Environment(undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=title,
        about=about(results),
        sections=sections(results, _earlier(against)),
        colours=plots.SERIES,
        draw=lambda plot: Markup(plots.draw(plot)),  # markup of its own making, its texts escaped
        legend=plots.legend,
        footer=_footer(results),
    )


def sections(results: Results, against: Document | None) -> list[Section]:
    """All parts for which there are results, and the route map.

    Args:
        against: an earlier build report, for the changes.
    """
    series = Series(row.name for row in reversed(routes_of("verify")))
    found = [
        curves.speedup(results, series),
        curves.roofline(results, series),
        curves.error(results, series),
        records.evidence(results.evidence),
        records.resources(results.builds, against),
        route_map(),
        runs.runs(results.runs),
        records.parity(results.parity),
        records.fuzz(results.fuzz),
    ]
    return [section for section in found if section.plots or section.tables or section.runs or section.map]


def _earlier(file: Path | None) -> Document | None:
    if file is None:
        return None
    builds = read([file]).builds
    if not builds:
        raise InputError(f"{file} is no build report; required: what hfk build --json wrote")
    return builds[0]


# ---- above and below ------------------------------------------------------------------------------------------------


def about(results: Results) -> list[tuple[str, str]]:
    """What was measured, and on what it was: device, driver, compiler, date; each line once."""
    lines: list[tuple[str, str]] = []
    for name, documents in (("Routes", results.tables), ("Other libraries", results.peers)):
        for d in documents:
            facts = (
                d.get("name"),
                _with("driver", d.get("driver")),
                d.get("compiler"),
                _with("torch", d.get("torch")),
                d.get("date"),
            )
            lines.append((name, _joined(facts)))
    for r in results.evidence:
        who = f"Evidence, {r.kind}"
        lines.append((who, _joined((r.arch, r.device, _with("driver", r.driver), compiler(r.toolchain), r.date))))
    kernels = [kernel for document in results.builds for kernel in document["kernels"]]
    for (named,), group in grouped(kernels, "compiler"):
        lines.append(("Resources", f"{', '.join(dict.fromkeys(k['arch'] for k in group))}: {named}"))
    for run in results.runs:
        lines.append(("A/B pairs", _joined((runs.machine(run), run.get("date", "")[:10]))))
    for _, document in results.fuzz:
        lines += [("Fuzzing", _joined((records.device(one), document.get("date")))) for one in document["devices"]]
    return list(dict.fromkeys(line for line in lines if line[1]))


def _with(name: str, value: Any) -> str | None:
    """The value behind its name, unless it says that itself; None where there is none."""
    return f"{name} {value}" if value and not str(value).startswith(name) else value


def _joined(facts: Iterable[Any]) -> str:
    return ", ".join(str(fact) for fact in facts if fact)


def _footer(results: Results) -> str:
    shown = f"Written by hipfire-kernels {__version__} from {', '.join(dict.fromkeys(results.names))}."
    left = f" Not shown, of no kind that it knows: {', '.join(results.passed_over)}." if results.passed_over else ""
    return shown + left
