"""Predicates. Each looks at a request and says what it saw, what it requires, and whether that holds.

A predicate that meets an unknown value (None, another type) fails; it never guesses and never raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from hipfire_kernels.archs import ARCHS
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.layout import MAX_HEAD_DIM, Q8_BLOCK
from hipfire_kernels.running.arguments import I32_MAX


@dataclass(frozen=True)
class Check:
    """One predicate's finding.

    Attributes:
        name: of the predicate.
        observed: what the request has.
        required: what the route needs, in words.
        ok: whether it holds.
    """

    name: str
    observed: Any
    required: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.observed!r}, required {self.required}"


Predicate = Callable[[AttendRequest], Check]
"""The same one for the same arguments, so that a decision on many routes evaluates it once."""


def is_int(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def base_arch(name: Any) -> str | None:
    """The arch without its feature suffix, or None for anything that is not a string."""
    return name.split(":", 1)[0] if isinstance(name, str) else None


@functools.cache
def equals(field: str, legal: Any) -> Predicate:
    """The field has exactly this value, and its type."""

    def predicate(r: AttendRequest) -> Check:
        seen = getattr(r, field)
        return Check(field, seen, repr(legal), type(seen) is type(legal) and seen == legal)

    return predicate


@functools.cache
def one_of(field: str, *legal: Any) -> Predicate:
    """The field has one of these values."""

    def predicate(r: AttendRequest) -> Check:
        seen = getattr(r, field)
        required = "one of " + ", ".join(map(str, legal))
        return Check(field, seen, required, any(type(seen) is type(v) and seen == v for v in legal))

    return predicate


@functools.cache
def between(field: str, low: int, high: int = I32_MAX) -> Predicate:
    """An integer field, inside both ends: by default the largest number that a kernel can be told."""

    def predicate(r: AttendRequest) -> Check:
        seen = getattr(r, field)
        return Check(field, seen, f"{low} .. {high}", is_int(seen) and low <= seen <= high)

    return predicate


def known_arch(r: AttendRequest) -> Check:
    """The arch is in the table that kernels can be built for."""
    return Check("arch", r.arch, "a known arch: " + ", ".join(ARCHS), base_arch(r.arch) in ARCHS)


def tiled_head_dim(r: AttendRequest) -> Check:
    """head_dim is a whole number of Q8_0 blocks, up to the largest a kernel holds in registers."""
    ok = is_int(r.head_dim) and r.head_dim is not None and 0 < r.head_dim <= MAX_HEAD_DIM and r.head_dim % Q8_BLOCK == 0
    return Check("head_dim", r.head_dim, f"a multiple of {Q8_BLOCK} up to {MAX_HEAD_DIM}", ok)


@functools.cache
def group_within(low: int, high: int) -> Predicate:
    """Query heads for each KV head, inside both ends."""

    def predicate(r: AttendRequest) -> Check:
        seen = r.group
        return Check(
            "group", seen, f"{low} .. {high} query heads for each KV head", seen is not None and low <= seen <= high
        )

    return predicate


def grouped_heads(r: AttendRequest) -> Check:
    """Query heads divide evenly over the KV heads."""
    heads, kv = r.n_heads, r.n_kv_heads
    ok = is_int(heads) and is_int(kv) and 0 < kv <= heads <= I32_MAX and heads % kv == 0
    return Check("n_heads/n_kv_heads", f"{heads}/{kv}", "n_heads a positive multiple of n_kv_heads", ok)
