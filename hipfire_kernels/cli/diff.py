"""`hfk diff`: two variants, or two revisions of one, side by side."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.building.resources import LABELS
from hipfire_kernels.cli import _choices, _out, _select
from hipfire_kernels.cli.isa import print_counts
from hipfire_kernels.errors import HipfireError, InputError

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact
    from hipfire_kernels.inspecting.compare import Build
    from hipfire_kernels.inspecting.isa import Listing
    from hipfire_kernels.inspecting.revision import Pinned
    from hipfire_kernels.running.devices.protocol import Device
    from hipfire_kernels.running.timing import Times

_ROUNDS = 15


@dataclass
class _Side:
    """One of the two: what it renders to, what that compiles to, and what was found on the device."""

    label: str
    kernel: Pinned
    artifact: Artifact
    listing: Listing | None
    build: Build | None
    why_not_run: str
    parity: dict[str, Any]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="VARIANT, or VARIANT@REVISION of git.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; @REVISION alone for the variant of A.")],
    arch: Annotated[
        str, _choices.option(_choices.archs, metavar="ARCH", help="The arch of source, resources and instructions.")
    ] = "gfx1100",
    device: Annotated[
        str, _choices.option(_choices.devices, metavar="DEVICE", help="Where parity and time are taken.")
    ] = "host",
    as_json: _out.Json = False,
) -> None:
    """Compare two kernels: source, resources, instructions, parity, and time in one interleaved run.

    A revision is rendered by its own code. It is run only where it declares the arguments and the grid as they are now.
    """
    from hipfire_kernels.running import devices as runtime

    on = runtime.device(device)
    first = a.partition("@")[0]
    with _out.compiling():
        sides = [_side(text, arch, on) for text in (a, first + b if b.startswith("@") else b)]
        times, why_not = _times(sides, on)
    changes = _changes(sides)
    text = _source(sides, arch)
    if as_json:
        _out.document(_document(sides, arch, text, changes, times, why_not))
        return
    print(text or "source: the same\n")
    _show_resources(changes, arch)
    listings = [(side.label, side.listing) for side in sides if side.listing is not None]
    if listings:
        print_counts(listings)
    _show_runs(sides, on, times, why_not)


def _side(text: str, arch: str, device: Device) -> _Side:
    from hipfire_kernels.building.builder import build
    from hipfire_kernels.inspecting import compare, revision
    from hipfire_kernels.inspecting.isa import listing

    name, at, commit = text.partition("@")
    if at and not commit:
        raise InputError(f"{text!r} names no revision; required: VARIANT@REVISION")
    variant = _select.one(name, []) if not at else None
    entry = name if variant is None else variant.entry
    archs = list(dict.fromkeys([arch, device.arch.name]))
    kernel = revision.at(commit, entry, archs) if at else revision.current(entry, archs)
    try:
        listed = listing(kernel, arch)
    except HipfireError as error:
        _out.note(f"{text}: no instructions: {error}")
        listed = None
    side = _Side(text, kernel, build(kernel, arch), listed, None, "", {})
    side.why_not_run = _why_not_run(kernel, archs)
    if not side.why_not_run:
        artifact = build(kernel, device.arch.name, device.toolchain)
        side.build = compare.Build(_select.one(entry, []), artifact)
        side.parity = _parity(side.build, device)
    return side


def _why_not_run(kernel: Pinned, archs: list[str]) -> str:
    """Why a kernel of a revision cannot take what is launched today; empty where it can."""
    from hipfire_kernels.inspecting import revision

    try:
        now = revision.current(kernel.entry, archs)
    except HipfireError as error:
        return str(error)
    return "" if now.launch == kernel.launch else "its arguments, LDS or grid are declared otherwise than now"


def _parity(one: Build, device: Device) -> dict[str, Any]:
    from hipfire_kernels.checking.oracle import oracle_of
    from hipfire_kernels.inspecting import compare

    try:
        results = compare.parity(one, list(oracle_of(one.variant).glance(one.variant)), device)
    except HipfireError as error:
        return {"cases": 0, "worst_error": None, "failures": [str(error)]}
    failures = [result.describe() for result in results if not result.ok]
    return {"cases": len(results), "worst_error": max(r.error for r in results), "failures": failures}


def _times(sides: list[_Side], device: Device) -> tuple[dict[str, Times], str]:
    """Times of both, or why there are none."""
    from hipfire_kernels.inspecting import compare
    from hipfire_kernels.running.devices.host import HostDevice

    builds = {name: side.build for name, side in zip("AB", sides, strict=True) if side.build is not None}
    if len(builds) < 2:
        return {}, "one of the two cannot be run"
    if any(side.parity["failures"] for side in sides):
        return {}, "one of the two is wrong"
    try:
        rows, ctx = (8, 256) if isinstance(device, HostDevice) else (16, 8192)
        case = compare.timing_case(builds["A"].variant, rows, ctx)
        return compare.times(builds, case, device, _ROUNDS), ""
    except InputError as error:
        return {}, f"no case fits both: {error}"


def _changes(sides: list[_Side]) -> list[dict[str, Any]]:
    from hipfire_kernels.building.resources import diff as differing

    return [vars(change) for change in differing(sides[0].artifact.resources, sides[1].artifact.resources)]


def _source(sides: list[_Side], arch: str) -> str:
    first, second = (side.kernel.source(arch).splitlines() for side in sides)
    titles = [f"{side.label} {arch}" for side in sides]
    return "\n".join(difflib.unified_diff(first, second, titles[0], titles[1], lineterm=""))


def _show_resources(changes: list[dict[str, Any]], arch: str) -> None:
    if not changes:
        print(f"\nresources on {arch}: the same\n")
        return
    print()
    rows = [[LABELS.get(c["field"], c["field"]), c["before"], c["after"], c["verdict"]] for c in changes]
    _out.table([f"resource on {arch}", "A", "B", "verdict"], rows, numeric=["A", "B"])
    print()


def _show_runs(sides: list[_Side], device: Device, times: dict[str, Times], why_not: str) -> None:
    from hipfire_kernels.running.timing import ratio

    print()
    for name, side in zip("AB", sides, strict=True):
        if side.why_not_run:
            print(f"parity of {name} on {device.name}: not run: {side.why_not_run}")
            continue
        found = side.parity
        wrong, worst = len(found["failures"]) or "none", found["worst_error"]
        error = "" if worst is None else f", worst error {worst:.2e}"
        print(f"parity of {name} on {device.name}: {found['cases']} cases, {wrong} wrong{error}")
        print("".join(f"  {line}\n" for line in found["failures"]), end="")
    if why_not:
        print(f"time: not taken: {why_not}")
        return
    middle, low, high = ratio(times["A"], times["B"])
    print(
        f"time on {device.name}: A {times['A'].median:.1f} us, B {times['B'].median:.1f} us, "
        f"A / B {middle:.3f} (quartiles {low:.3f} .. {high:.3f})"
    )


def _document(
    sides: list[_Side], arch: str, text: str, changes: list[dict[str, Any]], times: dict[str, Times], why_not: str
) -> dict[str, Any]:
    from hipfire_kernels.running.timing import ratio

    return {
        "arch": arch,
        "sides": [
            {
                "name": side.label,
                "resources": side.artifact.resources.as_dict(),
                "totals": None if side.listing is None else dict(side.listing.totals),
                "parity": side.parity or None,
                "not_run": side.why_not_run or None,
            }
            for side in sides
        ],
        "source_diff": text,
        "changes": changes,
        "times": {name: taken.as_dict() for name, taken in times.items()} or None,
        "ratio": ratio(times["A"], times["B"]) if times else None,
        "not_timed": why_not or None,
    }
