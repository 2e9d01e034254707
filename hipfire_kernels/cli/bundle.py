"""`hfk bundle`: kernels built ahead, for places without a compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hipfire_kernels.cli import _choices, _out, _select
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant


def bundle(
    arch: Annotated[str, _choices.option(_choices.archs_or_all, listed=True, metavar="ARCH,...", help="The archs.")],
    out: Annotated[Path, _out.new_folder("The folder to write; it must not hold a bundle yet.")],
    variants: _select.Variants = None,
    everything: _select.All = False,
    requests: Annotated[
        Path | None,
        typer.Option(help="JSON: a list of attention requests (`AttendRequest`); what their routes may launch."),
    ] = None,
    as_json: _out.Json = False,
) -> None:
    """Build variants into a folder that serves them without a compiler: HIPFIRE_KERNELS_BUNDLE, or `hk.use_bundle`."""
    from hipfire_kernels.archs import ARCHS
    from hipfire_kernels.building.builder import write_bundle

    archs = list(ARCHS) if arch == "all" else arch.split(",")
    if requests is not None:
        chosen = list(dict.fromkeys(_of_requests(requests)))
    else:
        chosen = _select.many(variants or [], everything=everything)
    kernels = [(variant, name) for name in archs for variant in chosen if variant.fits(name)]
    left_out = [f"{variant.name} {name}" for name in archs for variant in chosen if not variant.fits(name)]
    with _out.compiling():
        manifest = write_bundle(kernels, out)
    if as_json:
        _out.document({"manifest": str(manifest), "kernels": len(kernels), "left_out": left_out})
        return
    print(f"{manifest}: {len(kernels)} kernels for {', '.join(archs)}")
    if left_out:
        print(f"left out, for their LDS is not there: {', '.join(left_out)}")


def _of_requests(file: Path) -> Iterator[Variant]:
    """What the routes of each request's workload may launch, wherever it is admitted."""
    from hipfire_kernels.dispatch import AttendRequest
    from hipfire_kernels.dispatch.routes import routes_of
    from hipfire_kernels.errors import HipfireError
    from hipfire_kernels.running.attention import reducer

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        asked = [AttendRequest(**fields) for fields in found]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--requests {file} is no list of attention requests ({error})") from error
    for request in asked:
        for route in routes_of(request.workload):
            try:
                variant = route.variant(request)
            except HipfireError:  # a route that has no kernel for this shape
                continue
            merging = reducer(variant)
            yield from (variant, *([merging] if merging is not None else []))
