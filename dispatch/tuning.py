"""Tuning: which values of a family's free choices were measured as the fastest, for a class of shapes.

`hfk tune` writes the records, none is made at run time. Records ship with the package, in `tuning/`; those of the user
lie beside the user's evidence, and override them. A record holds for its arch, family, head_dim, numbers of heads and
of multiprocessors, and for a class of rows and of contexts; a shape without one has the family's defaults, and so has a
record one of whose kernels is rendered differently now. What was looked up, and why, is part of the decision.

In a family that is exact a row has the same bits in any company. So its number of splits follows neither the rows nor
the context of a call, which is that of its longest row, nor the capacity of a cache, which may have grown for it: such
a record is for ANY rows and contexts. The other choices change no bits, and may follow both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hipfire_kernels.archs import ARCHS
from hipfire_kernels.authoring.family import KernelFamily, Site, Variant
from hipfire_kernels.building.storage import tuning_root
from hipfire_kernels.dispatch import evidence
from hipfire_kernels.dispatch.checks import base_arch
from hipfire_kernels.dispatch.record import Rule, entries, hold, is_date, typed
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.shelf import Shelf
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import MAX_SPLITS, covering

ROWS = (4, 8, 16, 32)
"""Classes of query rows: the smallest that holds them. More rows have no class, and no tuning."""

ANY = 0
"""As class of rows and of contexts: all of them."""

Key = tuple[str, str, int, int, int, int, int]
"""Arch, family, head_dim, query heads, KV heads, class of rows, class of contexts."""


@dataclass(frozen=True)
class Gain:
    """Times of the default and of the choice at one shape, and their paired ratio with its interval."""

    rows: int
    ctx: int
    default_us: float
    chosen_us: float
    ratio: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Tuning:
    """One record.

    Attributes:
        arch: exact, without feature suffix.
        device, driver, toolchain, date: as in evidence.
        multiprocessors: of the device. Another number needs other splits.
        family: whose free choices it speaks of.
        head_dim, n_heads, n_kv_heads: of the calls.
        rows: class of query rows, or ANY.
        ctx: class of contexts, as `layout.covering` has them, or ANY.
        choice: name in the family's space to the value that was the fastest.
        gains: where it was measured.
        digests: entry point to SHA-256 of the rendered source, of every kernel that was timed.
        source: where it comes from.
    """

    arch: str
    device: str
    driver: str
    toolchain: str
    date: str
    multiprocessors: int
    family: str
    head_dim: int
    n_heads: int
    n_kv_heads: int
    rows: int
    ctx: int
    choice: dict[str, int]
    gains: tuple[Gain, ...]
    digests: dict[str, str]
    source: str

    @property
    def key(self) -> Key:
        """What it decides on."""
        return (self.arch, self.family, self.head_dim, self.n_heads, self.n_kv_heads, self.rows, self.ctx)

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Choice, class, gain and device in words."""
        least, most = (f"{of(gain.ratio for gain in self.gains):.2f}x" for of in (min, max))
        gained = least if least == most else f"{least} to {most}"
        return f"{_listed(self.choice)} ({_class(self.rows, self.ctx)}: {gained} on {self.device}, {self.date})"


def _listed(choice: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


def _class(rows: int, ctx: int) -> str:
    return "any rows and context" if rows == ctx == ANY else f"up to {rows} rows and {ctx} keys"


def classes(rows: int, ctx: int) -> tuple[int, int] | None:
    """The class of a shape; None for more rows than any has."""
    fitting = next((most for most in ROWS if rows <= most), None)
    return None if fitting is None else (fitting, covering(ctx))


# ---- files ----------------------------------------------------------------------------------------------------------


def load(text: str, name: str) -> tuple[Tuning, ...]:
    """The records of a tuning file.

    Raises:
        InputError: it is none of this version; the message names the file, the record and the field.
    """
    found = []
    for at, value in entries(text, name, "hfk tune"):
        record: Tuning = typed(Tuning, value, at)
        hold(_rules(record), at)
        found.append(record)
    return tuple(found)


def _rules(r: Tuning) -> list[Rule]:
    """What the fields of a record must be beyond their types."""
    legal = [family for family in families() if names(family)]
    found: list[Rule] = [
        ("arch", r.arch, "one of " + ", ".join(ARCHS), r.arch in ARCHS),
        ("family", r.family, "one of " + ", ".join(legal), r.family in legal),
        ("date", r.date, "YYYY-MM-DD", is_date(r.date)),
        ("multiprocessors", r.multiprocessors, "at least 1", r.multiprocessors > 0),
        ("n_kv_heads", r.n_kv_heads, "at least 1, into which n_heads divide", _divides(r.n_kv_heads, r.n_heads)),
        ("rows", r.rows, f"{ANY} or one of {', '.join(map(str, ROWS))}", r.rows in (ANY, *ROWS)),
        ("ctx", r.ctx, f"{ANY}, or tiles by a power of two", r.ctx == ANY or (r.ctx > 0 and covering(r.ctx) == r.ctx)),
        ("digests", r.digests, "the sources that were timed", bool(r.digests)),
        ("gains", r.gains, "measured, with positive ratios", bool(r.gains) and all(g.ratio > 0 for g in r.gains)),
    ]
    if all(ok for *_, ok in found):
        found += _choice_rules(r, families()[r.family])
    return found


def _divides(part: int, whole: int) -> bool:
    return part > 0 and whole > 0 and whole % part == 0


def _choice_rules(r: Tuning, family: KernelFamily) -> list[Rule]:
    free, anywhere = names(r.family), r.rows == r.ctx == ANY
    known = bool(r.choice) and r.choice.keys() <= set(free)
    splits, params = r.choice.get("splits", 1), {n: value for n, value in r.choice.items() if n != "splits"}
    wanted = {"head_dim": r.head_dim, "group": r.n_heads // r.n_kv_heads, **params}
    of_family = {name: value for name, value in wanted.items() if name in family.params}
    exists = any(of_family.items() <= dict(v.params).items() and v.fits(r.arch) for v in family.variants())
    where = "splits for any rows and context, the rest for a class" if family.exact else "for a class"
    placed = all(anywhere == (family.exact and name == "splits") for name in r.choice)
    return [
        ("choice", r.choice, "some of " + ", ".join(free), known),
        ("choice.splits", splits, f"1 .. {MAX_SPLITS}", 1 <= splits <= MAX_SPLITS),
        ("choice", r.choice, f"values of a variant that {family.name} has, and {r.arch} the LDS for", exists),
        ("rows and ctx", (r.rows, r.ctx), where, placed and (anywhere or ANY not in (r.rows, r.ctx))),
    ]


@functools.cache
def names(family: str) -> tuple[str, ...]:
    """The names of a family's free choices; empty for a family without any."""
    declared = families()[family]
    return tuple(declared.space(next(declared.variants()), Site(1, 1, 1)))


_SHELF: Shelf[Tuning] = Shelf("tuning", load, tuning_root)

shipped = _SHELF.shipped
"""The records that come with the package."""

current = _SHELF.current
"""The records in force, by what they decide on."""

read_file = _SHELF.read_file
"""The records of one tuning file. InputError where it cannot be read or is none, with the record and the field."""

using = _SHELF.using
"""A block inside of which these records are looked up in, and no others."""


def forget() -> None:
    """Read the files anew at the next decision, and render the sources."""
    _SHELF.forget()
    evidence.forget()


# ---- the lookup -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a launch takes of its family's space.

    Attributes:
        values: name to value; a name that is missing has the default.
        why: which records that comes from, or why there is none, in words.
    """

    values: Mapping[str, int]
    why: str

    @property
    def splits(self) -> int | None:
        """Splits of the context; None for the default."""
        return self.values.get("splits")

    def of(self, variant: Variant) -> Variant:
        """The variant in place of the one that the route takes by default."""
        params = dict(variant.params)
        return variant.family.variant(**{**params, **{n: v for n, v in self.values.items() if n in params}})


DEFAULT = Choice({}, "default")


def find(family: KernelFamily, request: AttendRequest) -> Choice | None:
    """What the request's launch takes of the family's space; None for a family without one. Pure.

    A launch that is captured or recorded covers the capacity of the cache, and has the choice for that.

    Raises:
        InputError: a tuning file of the user is not right.
    """
    if not names(family.name):
        return None
    fixed = request.capturing or request.recording
    covered = request.capacity if fixed and request.capacity else request.logical_ctx
    of_shape = classes(request.rows or 1, covered or 0)
    wanted = ([(ANY, ANY)] if family.exact else []) + ([of_shape] if of_shape else [])
    heads = (request.head_dim, request.n_heads, request.n_kv_heads)
    in_force = current()
    about = (base_arch(request.arch), family.name, *heads)
    found = [r for at in wanted if (r := in_force.get((*about, *at)))]
    refused = [f"{r.describe()} {fault}" for r in found if (fault := _fault(r, request))]
    held = [r for r in found if not _fault(r, request)]
    values = {name: value for r in held for name, value in r.choice.items()}
    said = ["tuned: " + "; ".join(r.describe() for r in held)] if held else []
    said += [f"default, not {reason}" for reason in refused]
    return Choice(values, "; ".join(said) or f"default {' and '.join(names(family.name))}: not tuned for this shape")


def _fault(record: Tuning, request: AttendRequest) -> str:
    """Why a record does not hold for a request; empty where it does."""
    there = request.multiprocessors
    if there is not None and there != record.multiprocessors:
        return f"tuned on {record.multiprocessors} multiprocessors, this device has {there}"
    stale = evidence.outdated(record.arch, record.digests)
    if stale:
        return f"stale: the source of {', '.join(stale)} has changed since; hfk tune measures anew"
    return ""
