"""One evidence record: what it holds, how it is read from JSON, and what makes it wrong.

A record says on which exact arch which route was held against the oracle and against the established route, and what
came of it. It is read strictly: every field must be there, of its type, and nothing else; a fault names the file, the
record and the field.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import date
from typing import Any, Protocol, get_args, get_origin

from hipfire_kernels.archs import ARCHS
from hipfire_kernels.dispatch.routes import ROUTES, per_group
from hipfire_kernels.errors import InputError

SCHEMA = 1
"""Version of the file format. A file of another version is refused."""

KINDS = ("reported", "measured")


@dataclass(frozen=True)
class Shape:
    """The shapes that were held and timed; `rows` is empty where that was not published."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Parity:
    """Against the float64 oracle: number of cases, worst max|diff| / max|reference|, the limit it was held to.

    `cases` is None where it was not published, `worst_error` where an output was not finite.
    """

    cases: int | None
    worst_error: float | None
    limit: float
    ok: bool


@dataclass(frozen=True)
class Speed:
    """One paired timing: time of the established route over time of this one, at a context and a number of rows.

    What was not published is None. `revision` names the source that was timed where `digests` does not.
    """

    ctx: int
    rows: int | None
    route_us: float | None
    established_us: float | None
    ratio: float
    quartiles: tuple[float, float] | None
    revision: str | None


@dataclass(frozen=True)
class Crossover:
    """The smallest measured context from which on the route is faster beyond noise, and the measured ones around it."""

    ctx: int
    below: int | None
    above: int | None


@dataclass(frozen=True)
class Verdict:
    """Whether the record opens its route, and why (not)."""

    admitted: bool
    why: str


@dataclass(frozen=True)
class Evidence:
    """One record.

    Attributes:
        arch: exact, without feature suffix.
        device: the card's name. None, like driver, toolchain and date, only where it was not published.
        driver: the driver's version.
        toolchain: identity of the compiler.
        date: of the measurement, YYYY-MM-DD.
        route: the route it speaks of.
        kind: "reported": published by others; "measured": from a run of `hfk qualify`.
        shape: what was measured. A record counts for its head_dim, and for no other.
        parity: against the oracle.
        speed: against the established route.
        crossover: None where it was not measured, or where there is none.
        digests: entry point to SHA-256 of the rendered source, of every kernel that was timed; None where reported.
        verdict: whether it opens the route.
        source: where it comes from.
    """

    arch: str
    device: str | None
    driver: str | None
    toolchain: str | None
    date: str | None
    route: str
    kind: str
    shape: Shape
    parity: Parity
    speed: tuple[Speed, ...]
    crossover: Crossover | None
    digests: dict[str, str] | None
    verdict: Verdict
    source: str

    @property
    def key(self) -> Key:
        """What it decides on: arch, route, head_dim, and, where the route has a kernel for each number of query heads
        of a KV head, that. There is at most one record of a key in force."""
        return record_key(self.arch, self.route, self.shape.head_dim, self.shape.n_heads // self.shape.n_kv_heads)

    def nearest(self, rows: int, ctx: int) -> Speed | None:
        """The timing nearest to a number of rows, and of those nearest to a context, by ratio; the last of equals."""
        found, least = None, (math.inf, math.inf)
        for s in self.speed:
            distance = (_times(s.rows or rows, rows), _times(s.ctx, ctx))
            if distance <= least:
                found, least = s, distance
        return found

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


Key = tuple[str, str, int, int]
"""Arch, route, head_dim, query heads for each KV head; the last is 0 for a route to which they are all the same."""


def record_key(arch: str, route: str, head_dim: int, group: int) -> Key:
    """The key under which a record decides on such a request."""
    return (arch, route, head_dim, group if per_group(route) else 0)


def _times(a: float, b: float) -> float:
    """How many times the smaller goes into the larger."""
    a, b = a or 1, b or 1
    return a / b if a > b else b / a


class Record(Protocol):
    """What a file of records holds: of a key at most one."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What it decides on."""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""


def dump(records: Sequence[Record]) -> str:
    """A file with these records."""
    return json.dumps({"schema": SCHEMA, "records": [r.as_dict() for r in records]}, indent=1, allow_nan=False) + "\n"


def load(text: str, name: str) -> tuple[Evidence, ...]:
    """The records of an evidence file.

    Args:
        text: the contents.
        name: of the file, for messages.

    Raises:
        InputError: it is no evidence file of this version; the message names the file, the record and the field.
    """
    return tuple(_record(value, at) for at, value in entries(text, name, "hfk qualify"))


def entries(text: str, name: str, writer: str) -> Iterator[tuple[str, Any]]:
    """The values of a file of records as JSON has them, each with where it is.

    Args:
        writer: the command that writes such files, for messages.

    Raises:
        InputError: it is no file of records of this version.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InputError(f"{name} is no JSON ({error}); repair it, or remove it and run {writer}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        seen = document.get("schema") if isinstance(document, dict) else document
        raise InputError(f"{name}: schema is {seen!r}; required: {SCHEMA}. Run {writer} to write it anew")
    if set(document) != {"schema", "records"} or not isinstance(document["records"], list):
        raise InputError(f"{name}: required: exactly the fields schema and records, records a list")
    for i, value in enumerate(document["records"]):
        yield f"{name}: records[{i}]", value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _record(value: Any, at: str) -> Evidence:
    record: Evidence = typed(Evidence, value, at)
    hold(_rules(record), at)
    return record


Rule = tuple[str, Any, str, bool]
"""What a field must be beyond its type: field, what is there, what is required, whether it holds."""


def hold(rules: Sequence[Rule], at: str) -> None:
    """Refuse a record that does not keep to its rules."""
    for field, seen, required, ok in rules:
        if not ok:
            raise InputError(f"{at}.{field} is {seen!r}; required: {required}")


def typed(kind: Any, value: Any, at: str) -> Any:
    """The JSON value as a value of an annotated type."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, at)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):  # of one type and None
        return None if value is None else typed(args[0], value, at)
    if origin is tuple:
        length = None if args[-1] is Ellipsis else len(args)
        if not isinstance(value, list) or length not in (None, len(value)):
            raise InputError(f"{at} is {value!r}; required: a list" + (f" of {length}" if length else ""))
        return tuple(typed(args[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise InputError(f"{at} is {value!r}; required: an object")
        return {name: typed(args[1], item, f"{at}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise InputError(f"{at} is {value!r}; required: {_NAMES[kind]}")
    return value


_hints: Any = functools.cache(typing.get_type_hints)

_NAMES = {str: "a string", int: "a whole number", float: "a finite number", bool: "true or false"}


def _object(kind: type[Any], value: Any, at: str) -> Any:
    names = [f.name for f in fields(kind)]
    if not isinstance(value, dict):
        raise InputError(f"{at} is {value!r}; required: an object with {', '.join(names)}")
    for name in names:
        if name not in value:
            raise InputError(f"{at}.{name} is missing; required: exactly the fields {', '.join(names)}")
    for name in value:
        if name not in names:
            raise InputError(f"{at}.{name} is not a field; required: exactly the fields {', '.join(names)}")
    hints = _hints(kind)
    return kind(**{name: typed(hints[name], value[name], f"{at}.{name}") for name in names})


def _rules(r: Evidence) -> list[Rule]:
    """What the fields of a record must be beyond their types."""
    routes = [route.name for route in ROUTES if route.needs_evidence]
    measured = r.kind == "measured"
    sizes = (r.shape.head_dim, r.shape.n_heads, r.shape.n_kv_heads, *r.shape.rows)
    error = r.parity.worst_error
    found: list[Rule] = [
        ("arch", r.arch, "one of " + ", ".join(ARCHS), r.arch in ARCHS),
        ("route", r.route, "one of " + ", ".join(routes), r.route in routes),
        ("kind", r.kind, "one of " + ", ".join(KINDS), r.kind in KINDS),
        ("date", r.date, "YYYY-MM-DD", r.date is None or is_date(r.date)),
        ("shape", sizes, "numbers of at least 1", min(sizes) > 0),
        ("parity.cases", r.parity.cases, "at least 1", r.parity.cases is None or r.parity.cases > 0),
        ("parity.limit", r.parity.limit, "above 0", r.parity.limit > 0),
        (
            "parity.ok",
            r.parity.ok,
            "false where the worst error is over the limit or not finite",
            not r.parity.ok or (error is not None and 0 <= error <= r.parity.limit),
        ),
        ("digests", r.digests, "the sources of measured evidence, null for reported", measured == bool(r.digests)),
        ("verdict.admitted", r.verdict.admitted, "false where parity failed", r.parity.ok or not r.verdict.admitted),
        ("verdict.why", r.verdict.why, "a reason", bool(r.verdict.why)),
    ]
    for name in ("device", "driver", "toolchain", "date"):
        seen = getattr(r, name)
        found.append((name, seen, "a string where the kind is measured", not measured or bool(seen)))
    if measured and r.verdict.admitted:
        found.append(("crossover", r.crossover, "measured, where the verdict admits", r.crossover is not None))
        found.append(("speed", r.speed, "measured, where the verdict admits", bool(r.speed)))
        found.append(("parity.cases", r.parity.cases, "a number where the kind is measured", bool(r.parity.cases)))
    if r.crossover is not None:
        found.append(("crossover", asdict(r.crossover), "below < ctx < above, all positive", _ordered(r.crossover)))
    return found + [rule for i, speed in enumerate(r.speed) for rule in _speed_rules(speed, f"speed[{i}]")]


def is_date(text: str) -> bool:
    """Whether a text is a calendar date as `date.isoformat` writes it."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _ordered(c: Crossover) -> bool:
    around = [ctx for ctx in (c.below, c.ctx, c.above) if ctx is not None]
    return around[0] > 0 and around == sorted(set(around))


def _speed_rules(s: Speed, at: str) -> list[Rule]:
    times = [t for t in (s.route_us, s.established_us) if t is not None]
    quartiles = s.quartiles is None or 0 < s.quartiles[0] <= s.ratio <= s.quartiles[1]
    return [
        (f"{at}.ctx", s.ctx, "at least 1", s.ctx > 0),
        (f"{at}.rows", s.rows, "at least 1", s.rows is None or s.rows > 0),
        (f"{at}.ratio", s.ratio, "above 0", s.ratio > 0),
        (f"{at}.route_us", times, "times above 0", all(t > 0 for t in times)),
        (f"{at}.quartiles", s.quartiles, "around the ratio", quartiles),
    ]
