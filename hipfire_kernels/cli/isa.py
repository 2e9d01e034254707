"""`hfk isa`: what a kernel's instructions are, by source line and by loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    text = listed.source.splitlines()
    for number, loop in enumerate(listed.loops, 1):
        first, last = loop.lines
        begins = text[first - 1].strip()[:40] if 0 < first <= len(text) else ""
        yield f"{'  ' * (loop.depth - 1)}loop {number}, lines {first}-{last}  {begins}".rstrip(), loop.counts


def _code(listed: Listing) -> Iterator[str]:
    """The instructions, each run of them under the source line that it comes from, with the loop in the margin."""
    text = listed.source.splitlines()
    inmost = {i: number for number, loop in enumerate(listed.loops, 1) for i in loop.instructions}
    place = (0, 0)
    for index, one in enumerate(listed.instructions):
        yield from (f"{label}:" for label in one.labels)
        if (one.line, one.body_line) != place:
            place = (one.line, one.body_line)
            called = f"   (for line {one.body_line})" if one.body_line != one.line else ""
            if 0 < one.line <= len(text):
                yield f"{one.line:5} | {text[one.line - 1].strip()}{called}"
        loop = f"loop {inmost[index]}" if index in inmost else ""
        yield f"{loop:{_MARGIN}}{one.kind:8} {one.text}"


def _document(listed: Listing, *, with_code: bool) -> dict[str, Any]:
    loops = [
        {"depth": loop.depth, "parent": loop.parent, "lines": loop.lines, "counts": dict(loop.counts)}
        for loop in listed.loops
    ]
    found: dict[str, Any] = {"entry": listed.entry, "arch": listed.arch, "totals": dict(listed.totals), "loops": loops}
    if with_code:
        found["instructions"] = [
            {"text": one.text, "class": one.kind, "line": one.line, "body_line": one.body_line}
            for one in listed.instructions
        ]
    return found
