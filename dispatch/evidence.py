"""Evidence: the records without which a fast route stays closed, where they come from, and whether they still hold.

Records ship with the package; `hfk qualify` writes the user's own, which override the shipped ones of the same arch,
route and head_dim. Measured evidence is bound to the rendered source of the kernels that were timed: once one of them
is rendered differently, the record is stale and opens nothing. Files are read, and sources rendered, at first use;
`forget()` has both looked at anew.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hipfire_kernels.building.storage import evidence_root
from hipfire_kernels.dispatch.checks import Check, base_arch
from hipfire_kernels.dispatch.record import Evidence, load, record_key
from hipfire_kernels.dispatch.shelf import Shelf
from hipfire_kernels.errors import RenderError

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant

_SHELF: Shelf[Evidence] = Shelf("evidence", load, evidence_root)

shipped = _SHELF.shipped
"""The records that come with the package."""

current = _SHELF.current
"""The records in force, by what they decide on."""

read_file = _SHELF.read_file
"""The records of one evidence file. InputError where it cannot be read or is none, with the record and the field."""

using = _SHELF.using
"""A block inside of which these records decide, and no others."""


def forget() -> None:
    """Read files and render sources anew at the next decision."""
    _SHELF.forget()
    source_digest.cache_clear()


def find(arch: Any, route: str, head_dim: Any, group: int | None = None) -> Evidence | None:
    """The record in force about a route on an arch for a head_dim; whether it opens the route is `check`'s word.

    Args:
        group: query heads for each KV head, which the split routes have a kernel each for.

    Raises:
        InputError: an evidence file of the user is not right.
    """
    name = base_arch(arch)
    if name is None or not isinstance(head_dim, int):
        return None
    return current().get(record_key(name, route, head_dim, group or 0))


# ---- whether a record holds -----------------------------------------------------------------------------------------


@functools.cache
def source_digest(entry: str, arch: str) -> str | None:
    """SHA-256 of a kernel's source as it is rendered now; None where there is no such kernel for the arch any more."""
    from hipfire_kernels.authoring import render

    variant = _variants().get(entry)
    if variant is None:
        return None
    try:
        return render.source_digest(variant.source(arch))
    except RenderError:
        return None


@functools.cache
def _variants() -> Mapping[str, Variant]:
    from hipfire_kernels.kernels import families

    return {v.entry: v for family in families().values() for v in family.variants()}


def changed(record: Evidence) -> tuple[str, ...]:
    """The kernels whose source is no longer the one that was measured."""
    return outdated(record.arch, record.digests or {})


def outdated(arch: str, digests: Mapping[str, str]) -> tuple[str, ...]:
    """The kernels, by entry point, that are rendered differently now than when their digests were taken."""
    return tuple(entry for entry, digest in digests.items() if source_digest(entry, arch) != digest)


def status(record: Evidence) -> str:
    """`fresh`, `stale`, or `unknown` for a record that names no source."""
    if record.digests is None:
        return "unknown"
    return "stale" if changed(record) else "fresh"


def check(record: Evidence | None, route: str, accepted: str) -> Check:
    """Whether a record opens a route.

    Args:
        record: what `find` found.
        route: for the message.
        accepted: "reported": what others published counts as well; "measured": only what was measured on the sources
            of today.
    """
    if record is None:
        required = f"a parity and speed record of {route} for exactly this arch and head_dim"
        return Check("evidence", None, required, False)
    if not record.verdict.admitted:
        seen = f"{record.kind}, not admitted: {record.verdict.why}"
        return Check("evidence", seen, "a record whose verdict admits the route", False)
    if record.kind == "reported" and accepted != "reported":
        return Check("evidence", record.kind, "measured evidence (HIPFIRE_EVIDENCE); hfk qualify writes it", False)
    stale = changed(record)
    if stale:
        seen = f"stale: the source of {', '.join(stale)} has changed since it was measured"
        return Check("evidence", seen, "a record of the sources of today; hfk qualify writes one", False)
    return Check("evidence", record.kind, f"a record that admits {route} for exactly this arch and head_dim", True)
