"""`hfk isa`: what a kernel's instructions are, by source line and by loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.authoring.places import NOWHERE, Places
from hipfire_kernels.cli import _choices, _out, _select

if TYPE_CHECKING:
    from hipfire_kernels.inspecting.isa import Counts, Listing

_MARGIN = 11


def isa(
    name: Annotated[str, typer.Argument(metavar="VARIANT", help="A variant's entry name, or a family with --param.")],
    arch: Annotated[str, _choices.option(_choices.archs, metavar="ARCH", help="A gfx or sm arch.")],
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Repeatable.")] = None,
    toolchain: Annotated[
        str | None,
        _choices.option(_choices.toolchains, metavar="NAME", help="clang or nvrtc. [default: the first that works]"),
    ] = None,
    counts: Annotated[bool, typer.Option("--counts", help="The counts alone.")] = False,
    as_json: _out.Json = False,
) -> None:
    """Print a kernel's instructions with their source lines, then how many there are of each class, by loop.

    A loop's counts are of one turn as it stands in the code, inner loops counted once.
    """
    from hipfire_kernels.inspecting.isa import listing

    with _out.compiling():
        listed = listing(_select.one(name, param or []), arch, toolchain)
    if as_json:
        _out.document(_document(listed, with_code=not counts))
        return
    if not counts:
        for line in _code(listed):
            print(line)
        print()
    print_counts([("", listed)])


def print_counts(listings: Sequence[tuple[str, Listing]]) -> None:
    """A table of kernels and their loops against classes of instructions, those that are in none left out."""
    from hipfire_kernels.inspecting.isa import KINDS

    shown = [kind for kind in [*KINDS, "all"] if any(listed.totals[kind] for _, listed in listings)]
    rows = [
        [label, where, *(counts[kind] or "" for kind in shown)]
        for label, listed in listings
        for where, counts in _parts(listed)
    ]
    labelled = any(label for label, _ in listings)
    columns = ["", "where", *shown] if labelled else ["where", *shown]
    _out.table(columns, rows if labelled else [row[1:] for row in rows], numeric=shown)


def _parts(listed: Listing) -> Iterator[tuple[str, Counts]]:
    yield "kernel", listed.totals
    places = Places.of(listed.source)
    for number, loop in enumerate(listed.loops, 1):
        first, last = loop.lines
        where = f"{first}-{last.line}" if first.file else "no line"
        yield f"{'  ' * (loop.depth - 1)}loop {number}, {where}  {places.text(first)[:40]}".rstrip(), loop.counts


def _code(listed: Listing) -> Iterator[str]:
    """The instructions, each run of them under the source line that it comes from, with the loop in the margin."""
    places = Places.of(listed.source)
    inmost = {i: number for number, loop in enumerate(listed.loops, 1) for i in loop.instructions}
    place = (NOWHERE, NOWHERE)
    for index, one in enumerate(listed.instructions):
        yield from (f"{label}:" for label in one.labels)
        if (one.at, one.body) != place:
            place = (one.at, one.body)
            called = f"   (for {one.body})" if one.body != one.at else ""
            if one.at.file:
                yield f"{one.at} | {places.text(one.at)}{called}"
        loop = f"loop {inmost[index]}" if index in inmost else ""
        yield f"{loop:{_MARGIN}}{one.kind:8} {one.text}"


def _document(listed: Listing, *, with_code: bool) -> dict[str, Any]:
    loops = [
        {
            "depth": loop.depth,
            "parent": loop.parent,
            "lines": [str(place) for place in loop.lines],
            "counts": dict(loop.counts),
        }
        for loop in listed.loops
    ]
    found: dict[str, Any] = {"entry": listed.entry, "arch": listed.arch, "totals": dict(listed.totals), "loops": loops}
    if with_code:
        found["instructions"] = [
            {"text": one.text, "class": one.kind, "at": str(one.at), "body": str(one.body)}
            for one in listed.instructions
        ]
    return found
