"""Evidence: the records without which a fast route stays closed, where they come from, and whether they still hold.

Records ship with the package; `hfk qualify` writes the user's own, which override the shipped ones of the same arch,
route and head_dim. Measured evidence is bound to the rendered source of the kernels that were timed: once one of them
is rendered differently, the record is stale and opens nothing. Files are read, and sources rendered, at first use;
`forget()` has both looked at anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError, RenderError
from ..storage import evidence_root
from .checks import Check, base_arch
from .record import Evidence, Key, Record, load, record_key

if TYPE_CHECKING:
    from importlib.abc import Traversable
    from pathlib import Path

    from ..family import Variant

R = TypeVar("R", bound=Record)
_override: ContextVar[Mapping[Key, Evidence] | None] = ContextVar("hipfire_evidence", default=None)


@functools.cache
def shipped() -> tuple[Evidence, ...]:
    """The records that come with the package."""
    return read_all((resources.files("hipfire_kernels.dispatch") / "evidence").iterdir(), read_file, "evidence")


def read_all(files: Iterable[Traversable], read: Callable[[Traversable], tuple[R, ...]], what: str) -> tuple[R, ...]:
    """The records of a folder's JSON files.

    Raises:
        InputError: a file cannot be read or is not right, or two records decide on the same thing.
    """
    owner: dict[tuple[Any, ...], str] = {}
    found: list[R] = []
    for file in sorted(files, key=lambda f: f.name):
        if not file.name.endswith(".json"):
            continue
        for record in read(file):
            if record.key in owner:
                both = f"{owner[record.key]} and {file}"
                raise InputError(f"{both} both have {what} for {record.key}; required: one record, remove the other")
            owner[record.key] = str(file)
            found.append(record)
    return tuple(found)


def read_file(file: Traversable) -> tuple[Evidence, ...]:
    """The records of one file.

    Raises:
        InputError: it cannot be read, or is no evidence file; the message names the record and the field.
    """
    return load(text_of(file, "evidence"), f"evidence file {file}")


def text_of(file: Traversable, what: str) -> str:
    """The text of a file of records, which is of `what`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} file {file} cannot be read ({error}); repair it or remove it") from error


@functools.cache
def _on_file(named: str | None) -> Mapping[Key, Evidence]:
    """Shipped records and those of the user's folder, which win. `named`: what the variable says, for the memory."""
    own = read_all(files_of(evidence_root()), read_file, "evidence")
    return {r.key: r for records in (shipped(), own) for r in records}


def files_of(folder: Path) -> list[Path]:
    """What is in a folder of the user's, which need not exist."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"evidence folder {folder} cannot be read ({error.strerror})") from error


def _current() -> Mapping[Key, Evidence]:
    chosen = _override.get()
    return _on_file(os.environ.get("HIPFIRE_EVIDENCE_DIR")) if chosen is None else chosen


@contextlib.contextmanager
def using(records: Sequence[Evidence]) -> Iterator[None]:
    """Decide on these records, and no others, inside the block."""
    token = _override.set({r.key: r for r in records})
    try:
        yield
    finally:
        _override.reset(token)


def forget() -> None:
    """Read files and render sources anew at the next decision."""
    _on_file.cache_clear()
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
    return _current().get(record_key(name, route, head_dim, group or 0))


# ---- whether a record holds -----------------------------------------------------------------------------------------


@functools.cache
def source_digest(entry: str, arch: str) -> str | None:
    """SHA-256 of a kernel's source as it is rendered now; None where there is no such kernel for the arch any more."""
    from .. import render

    variant = _variants().get(entry)
    if variant is None:
        return None
    try:
        return render.source_digest(variant.source(arch))
    except RenderError:
        return None


@functools.cache
def _variants() -> Mapping[str, Variant]:
    from ..kernels import families

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
