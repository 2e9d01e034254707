"""`hfk isa`: what a kernel's instructions are, by source line and by loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.authoring.places import NOWHERE, Places
from hipfire_kernels.cli import _choices, _out, _select

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant
    from hipfire_kernels.inspecting.executed import Work
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
    executed: Annotated[
        bool, typer.Option("--executed", help="Of a gfx arch: run it on the interpreter, and count what is executed.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Of --executed: query rows.")] = 16,
    keys: Annotated[int, typer.Option(min=256, help="Of --executed: keys.")] = 1024,
    as_json: _out.Json = False,
) -> None:
    """Print a kernel's instructions with their source lines, then how many there are of each class, by loop.

    A loop's counts are of one turn as it stands in the code, inner loops counted once. With --executed they are of a
    whole call, its reducer included, and what they grow by with each key and row. They are no time.
    """
    from hipfire_kernels.inspecting.isa import listing

    if executed:
        with _out.compiling():
            work = _executed(_select.one(name, param or []), arch, rows, keys)
        _show_executed(work, as_json)
        return
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


# ---- what is executed -----------------------------------------------------------------------------------------------


def _executed(variant: Variant, arch: str, rows: int, keys: int) -> dict[str, Work]:
    """By kernel, of a call with so many keys; and what a key and row adds, from one with half as many."""
    from hipfire_kernels.checking.oracle import check
    from hipfire_kernels.errors import InputError
    from hipfire_kernels.inspecting import compare
    from hipfire_kernels.inspecting.executed import count
    from hipfire_kernels.running.devices.isa import IsaDevice, names

    if f"isa:{arch}" not in names():
        raise InputError(f"--executed for {arch}; the interpreter has gfx11 and gfx12 alone")
    device = IsaDevice(arch)

    def counted(ctx: int) -> tuple[dict[str, Work], Work]:
        case = compare.timing_case(variant, rows, ctx)
        found = count(device, lambda: check(variant, case, device))
        every = list(found.values())
        total = every[0]
        for one in every[1:]:
            total = total.with_all(one)
        return found, total

    (found, total), (_, half) = counted(keys), counted(keys // 2)
    return {**found, "a key and row": total.less(half).scaled(1 / ((keys - keys // 2) * rows))}


def _show_executed(work: dict[str, Work], as_json: bool) -> None:
    if as_json:
        _out.document(
            {name: {"instructions": dict(w.instructions), "traffic": dict(w.traffic)} for name, w in work.items()}
        )
        return
    columns = [k for k in next(iter(work.values())).instructions if any(w.instructions[k] for w in work.values())]
    rows = [[n, *(_number(w.instructions[k]) for k in columns), _number(w.total)] for n, w in work.items()]
    _out.table(["executed", *columns, "all"], rows, numeric=[*columns, "all"])
    print()
    kinds = [k for k in next(iter(work.values())).traffic if any(w.traffic[k] for w in work.values())]
    _out.table(
        ["bytes", *kinds], [[n, *(_number(w.traffic[k]) for k in kinds)] for n, w in work.items()], numeric=kinds
    )
    print("\nCounts of the interpreter: instructions of waves, and bytes as they ask for them. They are no time.")


def _number(x: float) -> str:
    """Whole where it is a count; a few digits of what a key adds."""
    return "" if not x else f"{x:,.0f}" if x >= 1000 or x == int(x) else f"{x:.3g}"
