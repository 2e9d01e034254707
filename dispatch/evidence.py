"""Evidence: the records without which a fast route stays closed.

A record says on which exact arch which route was held against what, by whom. `reported` evidence was published by
others; `measured` evidence comes from this project's own runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .checks import base_arch


@dataclass(frozen=True)
class Evidence:
    """One record.

    Attributes:
        arch: exact, without feature suffix.
        route: the route it opens.
        head_dims: the head_dims it speaks of.
        kind: "reported" or "measured".
        worst_error: worst max|diff| / max|reference| that was seen.
        speedup: context to time of the established route over time of this one.
        source: where it comes from.
    """

    arch: str
    route: str
    head_dims: tuple[int, ...]
    kind: str
    worst_error: float
    speedup: dict[str, float]
    source: str

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**self.__dict__, "head_dims": list(self.head_dims)}


_override: ContextVar[tuple[Evidence, ...] | None] = ContextVar("hipfire_evidence", default=None)


@functools.cache
def shipped() -> tuple[Evidence, ...]:
    """The records that come with the package."""
    folder = resources.files("hipfire_kernels.dispatch") / "evidence"
    records: list[Evidence] = []
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            for record in json.loads(file.read_text(encoding="utf-8"))["records"]:
                records.append(Evidence(**{**record, "head_dims": tuple(record["head_dims"])}))
    return tuple(records)


def current() -> tuple[Evidence, ...]:
    """The records in force: those of an enclosing `using`, else the shipped ones."""
    chosen = _override.get()
    return shipped() if chosen is None else chosen


@contextlib.contextmanager
def using(records: Sequence[Evidence]) -> Iterator[None]:
    """Decide on these records, and no others, inside the block."""
    token = _override.set(tuple(records))
    try:
        yield
    finally:
        _override.reset(token)


def find(arch: str | None, route: str, head_dim: int | None) -> Evidence | None:
    """The record that opens a route on an arch for a head_dim, if there is one."""
    name = base_arch(arch)
    for record in current():
        if record.arch == name and record.route == route and head_dim in record.head_dims:
            return record
    return None
