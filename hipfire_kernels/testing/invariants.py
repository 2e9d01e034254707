"""Exact invariants: what must hold to the bit, whatever the arithmetic of a kernel is.

Each takes what one case gave and says what is wrong, or nothing. `arranged` ones are about launches, views and
workspaces of this library; an engine's kernel, which has its own, is not asked for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.errors import InputError
from hipfire_kernels.layout import TILE, tiles
from hipfire_kernels.running.devices.protocol import Ordered
from hipfire_kernels.testing.case import FuzzCase, kind_of, variant_of
from hipfire_kernels.testing.contents import UNSEEN
from hipfire_kernels.testing.requests import AnyRequest, Request
from hipfire_kernels.testing.subjects import Arrangement, Subject, VariantSubject, least_weight
from hipfire_kernels.testing.yardstick import error_of, expected

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Given:
    """What an invariant starts from: the case, its tensors, how they were laid out, and the output that gave."""

    subject: Subject
    case: FuzzCase
    request: AnyRequest
    how: Arrangement
    out: Array

    def rng(self) -> np.random.Generator:
        """A generator of the invariant's own."""
        return np.random.default_rng([self.case.seed, 1])

    def run(self, request: AnyRequest | None = None, **how: Any) -> Array:
        """The output of another call. A fault of the call itself, which parity checks, is not looked at here."""
        started = self.subject.start(request or self.request, dataclasses.replace(self.how, **how))
        return started.result()[0]


def differs(got: Array, want: Array, what: str) -> str:
    """Where two arrays are not equal to the bit; nothing when they are.

    Which elements of a row that is no number are finite may follow what else is in the call: those that are in both
    arrays must be equal, and no row may be a number in one alone.
    """
    number, other = np.isfinite(got), np.isfinite(want)
    both_none = ~number.all(axis=-1, keepdims=True) & ~other.all(axis=-1, keepdims=True)
    apart = np.where(both_none, number & other & (got != want), ~number | ~other | (got != want))
    if not apart.any():
        return ""
    row, head, dim = (int(i) for i in np.argwhere(apart)[0])
    return (
        f"{what}: {got[row, head, dim]:.9g} instead of {want[row, head, dim]:.9g} at row {row}, head {head}, dim {dim}"
    )


def _ones(g: Given) -> str:
    """V of ones gives one: exactly where all weights are, as with q of zeros, else within the tolerance."""
    ours = g.request.of_ones()
    sees = np.asarray(g.request.visible().any(axis=1), np.float32)
    for request, limit, weights in ((ours.even(), 0.0, " with equal weights"), (ours, g.subject.tolerance, "")):
        exact = expected(request, g.subject.tolerance, g.subject.largest, least_weight(g.subject))
        ones = np.where(np.isfinite(exact.out), sees[:, None, None], np.nan)
        want = dataclasses.replace(exact, out=ones, spread=np.zeros_like(exact.spread))
        apart, wrong = error_of(g.run(request), want, g.subject.tolerance)
        if wrong or apart > limit:
            return f"V of ones{weights} gives one with an error of {apart:.3g} {wrong}".rstrip()
    return ""


def _heads(g: Given) -> str:
    """KV heads in another order, each with its group, give the outputs in that order; so do the heads of a group, where
    a row's bits do not depend on what it shares a matrix with."""
    rng, group = g.rng(), g.case.group
    kv_heads = rng.permutation(g.case.n_kv_heads)
    inside = rng.permutation(group) if variant_of(g.case).family.exact else np.arange(group)
    heads = (kv_heads[:, None] * group + inside).ravel()
    return differs(g.run(g.request.reordered(kv_heads, heads)), g.out[:, heads], "heads in another order")


def _lone_row(g: Given) -> str:
    """A row alone has the bits it has in company."""
    row = int(g.rng().integers(0, g.case.rows))
    alone = g.run(g.request.take(slice(row, row + 1)))
    return differs(alone, g.out[row : row + 1], f"row {row} alone")


def _split(g: Given) -> str:
    """Two calls, each with a part of the rows, give what one gives; so do other sub-batches."""
    at = int(g.rng().integers(0, g.case.rows + 1))
    parts = [g.run(g.request.take(part)) for part in (slice(0, at), slice(at, None)) if len(g.request.q[part])]
    fault = differs(np.concatenate(parts), g.out, f"the rows split at {at}")
    sub = int(g.rng().integers(1, g.case.rows + 1))
    return fault or differs(g.run(partials_rows=sub), g.out, f"sub-batches of {sub} rows")


def _unseen_keys(g: Given) -> str:
    """More cache behind the last key, of any bytes, and a workspace for it change nothing."""
    assert isinstance(g.request, Request)
    more = int(g.rng().integers(1, 2 * TILE))
    tail = UNSEEN["random"](g.rng(), (more, *g.request.k_cache.shape[1:]))
    k_cache, v_cache = (np.concatenate([cache, tail]) for cache in (g.request.k_cache, g.request.v_cache))
    covered = len(k_cache) if isinstance(g.subject, VariantSubject) else None
    grown = dataclasses.replace(g.request, k_cache=k_cache, v_cache=v_cache)
    got = g.run(grown, covered=covered, spare_tiles=g.case.spare_tiles + 2)
    return differs(got, g.out, f"{more} unseen keys appended")


def _views(g: Given) -> str:
    """Views at another offset of their allocation change nothing."""
    offset = int(g.rng().integers(1, 8))
    return differs(g.run(offset=g.how.offset + offset), g.out, f"views {offset} elements further on")


def _strides(g: Given) -> str:
    """An array with gaps is refused before anything is launched; a stride of an extent of one does not matter."""
    assert isinstance(g.subject, VariantSubject)
    device = g.subject.device
    host = np.zeros((2 * g.case.rows + 1, g.case.n_heads, g.case.head_dim), np.float32)
    there = device.to_device(host)
    wide, unit = host.strides, 4
    for shape, strides, legal in (
        ((g.case.rows + 1, *host.shape[1:]), (2 * wide[0], wide[1], unit), False),
        ((1, *host.shape[1:]), (3 * wide[0] + 8, wide[1], unit), True),
    ):
        try:
            device.view("q", _strided(there, shape, strides))
        except InputError:
            if legal:
                return f"a view of shape {shape} with strides {strides} is refused; an extent of one has no stride"
        else:
            if not legal:
                return f"a view of shape {shape} with strides {strides} is taken as C-contiguous"
    return ""


def _strided(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, shape, strides)

    return SimpleNamespace(
        __cuda_array_interface__={**array.__cuda_array_interface__, "shape": shape, "strides": strides}, keeps=array
    )


def _in_flight(g: Given) -> str:
    """Two launches in flight, on streams of their own (threads, on the host), do not know of each other."""
    other = dataclasses.replace(g.how, stream="side", offset=g.how.offset + 1, spare_tiles=g.how.spare_tiles + 1)
    running = [g.subject.start(g.request, how) for how in (dataclasses.replace(g.how, stream="side"), other)]
    outputs = [one.result()[0] for one in running]
    return differs(outputs[0], g.out, "the first of two launches in flight") or differs(
        outputs[1], g.out, "the second of two launches in flight"
    )


def _thread_order(g: Given) -> str:
    """The order of a block's threads between switch points does not matter. A GPU, which has its own, runs again."""
    assert isinstance(g.subject, VariantSubject)
    if not isinstance(g.subject.device, Ordered):
        return differs(g.run(), g.out, "the same call again")
    host = g.subject.device
    before = host.thread_order
    try:
        # On the same device: another would load every kernel once more.
        for host.thread_order in (g.case.seed, g.case.seed + 1):
            if fault := differs(g.run(), g.out, f"threads in the order of seed {host.thread_order}"):
                return fault
    finally:
        host.thread_order = before
    return ""


def _uncovered(g: Given) -> str:
    """A row that sees more than the launch covers, whole tiles here, is NaN; the others do not notice."""
    assert isinstance(g.request, Request)
    bounds = g.request.positions.astype(np.int64) + 1
    if g.request.tree_bias is not None:
        bounds[:] = g.request.ctx
    covered = TILE * int(g.rng().integers(1, tiles(g.request.ctx) + 1))
    got, behind = g.run(covered=covered), bounds > covered
    if not np.isnan(got[behind]).all():
        return f"a launch that covers {covered} keys has numbers in rows that see more"
    want = np.where(behind[:, None, None], got, g.out)
    return differs(got, want, f"a launch that covers {covered} keys")


@dataclass(frozen=True)
class Invariant:
    """One invariant.

    Attributes:
        check: what is wrong, or an empty text.
        kinds: the kinds of calls it holds for.
        arranged: it is about this library's own launches, not about an engine's.
    """

    check: Callable[[Given], str]
    kinds: tuple[str, ...] = ("verify", "draft")
    arranged: bool = False


INVARIANTS: Mapping[str, Invariant] = {
    "ones": Invariant(_ones),
    "heads": Invariant(_heads),
    "lone_row": Invariant(_lone_row),
    "split": Invariant(_split),
    "unseen_keys": Invariant(_unseen_keys, ("verify",)),
    "views": Invariant(_views, arranged=True),
    "strides": Invariant(_strides, arranged=True),
    "in_flight": Invariant(_in_flight, arranged=True),
    "thread_order": Invariant(_thread_order, arranged=True),
    "uncovered": Invariant(_uncovered, ("verify",), arranged=True),
}
"""The exact invariants by name."""


def invariants_of(variant: Variant) -> tuple[str, ...]:
    """Names of the invariants that hold for a variant."""
    # A sliding row's mask depends on its place, and so on its company.
    company = dict(variant.params).get("sliding", False) or not variant.family.exact
    held = [name for name, found in INVARIANTS.items() if kind_of(variant) in found.kinds]
    return tuple(name for name in held if not (company and name in ("lone_row", "split"))) or ("thread_order",)


def violated(name: str, given: Given) -> str:
    """What is wrong with one invariant, or an empty text. One of arrangement says nothing about an engine's kernel."""
    found = INVARIANTS[name]
    if found.arranged and not isinstance(given.subject, VariantSubject):
        return ""
    return found.check(given)
