"""`hfk report`: one HTML page from result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hipfire_kernels.cli import _out


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Results of bench, qualify, ab, fuzz or build, as JSON.")
    ],
    out: Annotated[Path, _out.new_file("The page to write.")] = Path("report.html"),
    against: Annotated[Path | None, typer.Option(help="An earlier build report: say what changed since.")] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "hipfire-kernels results",
    as_json: _out.Json = False,
) -> None:
    """Speed-up, roofline, error, resources, routes and A/B pairs on one page that needs no network."""
    from hipfire_kernels.bench.report import page

    text = page(files, against, title)
    _out.save(out, text)
    if as_json:
        _out.document({"out": str(out), "bytes": len(text.encode())})
    else:
        print(f"{out}: {len(text.encode()) / 1024:.0f} KB")
