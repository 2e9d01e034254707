"""The launches that make one attention call: verify kernel and reducer over sub-batches, the KV write.

This knows kernels, not routes: the caller says which variant. Everything an argument can be wrong about is refused
here, before the first launch.
"""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Site, Variant
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import (
    MAX_HEAD_DIM,
    MAX_SPLITS,
    Q8_BLOCK,
    Q8_BYTES,
    Q8_MAX,
    kv_cache_shape,
    partials_shape,
    tiles,
)
from hipfire_kernels.running.arguments import real, whole, window_keys
from hipfire_kernels.running.binding import BoundLaunch, SharedArrays, bind, kernel, launch, prepare, renew
from hipfire_kernels.running.devices.protocol import Device, Launch, OfThisProcess, View

SPLIT_ROWS = 32
"""Query rows of a split kernel whose partials are held at once: 26 MB for 24 heads, 33 splits and 256 dims, whatever
the context. Records of tiles are as many as the context has tiles: there a limit on rows is a limit on memory."""

PARTIALS_ROWS = 16
"""Query rows whose partials are held at once by default: one speculative block of 16 in one go."""


@dataclass(frozen=True)
class VerifyShape:
    """The extents of one verify-attention call."""

    rows: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int


def check_verify(device: Device, q: Any, k_cache: Any, v_cache: Any) -> VerifyShape:
    """Check the arrays of a verify-attention call.

    Args:
        q: float32 [rows, n_heads, head_dim], at least one row.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].

    Raises:
        InputError: naming the argument, what was seen and what is legal.
    """
    rows, n_heads, head_dim = _shape(device, "q", q, "f32", "[rows][n_heads][head_dim]", 3)
    layout = f"[capacity][n_kv_heads][head_dim / {Q8_BLOCK}][{Q8_BYTES}]"
    k_shape = _shape(device, "k_cache", k_cache, "u8", layout, 4)
    v_shape = _shape(device, "v_cache", v_cache, "u8", layout, 4)
    check_heads(rows, n_heads, k_shape[1], head_dim)
    _check_caches(k_shape, v_shape, head_dim)
    return VerifyShape(rows, n_heads, k_shape[1], head_dim, k_shape[0])


def _check_caches(k_shape: tuple[int, ...], v_shape: tuple[int, ...], head_dim: int) -> None:
    if k_shape[3] != Q8_BYTES:
        raise InputError(f"k_cache has shape {k_shape}; required: a last extent of {Q8_BYTES}, one Q8_0 block")
    if k_shape[2] * Q8_BLOCK != head_dim:
        raise InputError(
            f"k_cache has shape {k_shape}; required: {head_dim // Q8_BLOCK} blocks for head_dim {head_dim}"
        )
    if v_shape != k_shape:
        raise InputError(f"v_cache has shape {v_shape}; required: the shape of k_cache, {k_shape}")


def check_heads(rows: int, n_heads: int, n_kv_heads: int, head_dim: int, name: str = "q") -> None:
    """Refuse a row count of zero, a head_dim no kernel has, and query heads that do not divide over the KV heads.

    Args:
        name: of the array that has the rows, for the message.
    """
    if rows == 0:
        raise InputError(f"{name} has 0 rows; required: at least one row")
    if head_dim % Q8_BLOCK or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InputError(f"head_dim is {head_dim}; required: a multiple of {Q8_BLOCK} up to {MAX_HEAD_DIM}")
    if n_kv_heads == 0 or n_heads == 0 or n_heads % n_kv_heads:
        raise InputError(
            f"n_heads is {n_heads} with {n_kv_heads} KV heads; required: a positive multiple of the KV heads"
        )


def check_positions(positions: npt.NDArray[Any], rows: int, capacity: int, *, least: int = -1) -> int:
    """Refuse positions of another dtype or number, or outside the cache; return the live context, the largest + 1.

    A position of -1 sees no key (its output row is zero); writing needs `least` 0.
    """
    if positions.dtype != np.int32 or positions.shape != (rows,):
        raise InputError(
            f"positions has dtype {positions.dtype} and shape {positions.shape}; required: int32 ({rows},)"
        )
    low, high = int(positions.min()), int(positions.max())
    if low < least or high >= capacity:
        wrong = low if low < least else high
        raise InputError(
            f"positions holds {wrong}; required: {least} .. {capacity - 1} for a cache of {capacity} positions"
        )
    return high + 1


def context(positions: npt.NDArray[Any], shape: VerifyShape, block_cols: int = 0, most: int | None = None) -> int:
    """Keys that the longest row sees, by positions in host memory.

    Args:
        positions: int32 [rows].
        block_cols: columns of the tree bias: every row then sees the keys 0 .. positions[0] + block_cols - 1.
        most: what the launch covers, where that is settled.

    Raises:
        InputError: see `check_positions`; or the tree, or a row, reaches beyond what it may.
    """
    seen = check_positions(positions, shape.rows, shape.capacity)
    if block_cols:
        start = int(positions[0])
        seen = start + block_cols
        if start < 0 or seen > shape.capacity:
            raise InputError(f"the tree covers cache slots {start} .. {seen - 1}; required: 0 .. {shape.capacity - 1}")
    if most is not None and seen > most:
        raise InputError(f"positions see {seen} keys; the launch covers {most}")
    return seen


class VerifyPlan(OfThisProcess, abc.ABC):
    """A verify family and the reducer, ready to run: built, loaded, workspace allocated, arguments packed.

    A plan has one workspace: it is for one stream, and one thread, at a time; a second thread is refused. After a run,
    `launches` is what it launched. `verify_plan` makes the one that a variant needs.

    Args:
        variant: of a family whose oracle is `attend`.
        shape: of every call.
        max_ctx: keys that the plan covers.
        block_cols: columns of the tree bias, for a variant with mask="tree".
        partials_rows: query rows whose partials the workspace holds; more rows go in sub-batches.
        partials: the workspace, float32 `partials_shape(n, ...)` for any n; allocated when None.
        splits: of the context, for a variant that splits it; the family's default when None.
    """

    send_instead = "make another one there"

    def __init__(
        self,
        variant: Variant,
        device: Device,
        shape: VerifyShape,
        max_ctx: int,
        *,
        block_cols: int = 0,
        partials_rows: int = PARTIALS_ROWS,
        partials: Any = None,
        splits: int | None = None,
    ) -> None:
        self.variant, self.device, self.shape = variant, device, shape
        self.max_ctx = whole("max_ctx", max_ctx, 0, legal="a number of keys")
        self.mask = dict(variant.params).get("mask", "causal")
        wanted = workspace_shape(variant, device.multiprocessors, shape, self.max_ctx, partials_rows, splits)
        self.partials = device.empty(wanted, np.float32) if partials is None else partials
        held = device.view("partials", self.partials)
        if held.dtype != "f32" or held.shape[1:] != wanted[1:] or not held.shape[0]:
            raise InputError(
                f"partials has dtype {held.dtype} and shape {held.shape}; required: f32 {('rows', *wanted[1:])}"
            )
        self.workspace_bytes = 4 * math.prod(held.shape)
        merging = reducer(variant)
        for part in (variant, merging):
            if part is not None:
                kernel(part, device)
        self._scale = 1 / math.sqrt(shape.head_dim)
        self._covers = f"0 .. {self.max_ctx}, what the plan's workspace covers"
        self._set_to: tuple[int, float, int] | None = None
        self._running = threading.Lock()
        self.launches: list[Launch] = []
        self._batches = [
            self._bind(variant, merging, held, first, min(held.shape[0], shape.rows - first), block_cols)
            for first in range(0, shape.rows, held.shape[0])
        ]
        for bound in self._bound():
            bound.args.keeps = self.partials
        self._shared = SharedArrays(self._bound(), self._arrays(block_cols))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.variant.name} on {self.device.name}, up to {self.max_ctx} keys>"

    def _bound(self) -> list[BoundLaunch]:
        return [bound for launches in self._batches for bound in launches]

    @abc.abstractmethod
    def _extents(self, covered: int, window: int) -> tuple[dict[str, int], ...]:
        """What the first launch, and the merging one, are told of the keys covered, and of the window."""

    def _bind(
        self, variant: Variant, merging: Variant | None, partials: View, first_row: int, batch: int, block_cols: int
    ) -> tuple[BoundLaunch, ...]:
        arrays = self._arrays(block_cols)
        out = {"out": arrays.pop("out")}
        common = {"first_row": first_row, "batch": batch}
        if merging is None:
            return (bind(variant, {**arrays, **out}, **self._extents(1, 1)[0], scale=1.0),)
        first, second = self._extents(1, 1)
        attend = bind(variant, {**arrays, "partials": partials}, **common, **first, scale=1.0)
        views = {"partials": partials, "positions": arrays["positions"], **out}
        tree = {"block_cols": block_cols} if self.mask == "tree" else {}
        return attend, bind(merging, views, **common, **second, **tree)

    def _arrays(self, block_cols: int) -> dict[str, View]:
        """What a run is given, but for the addresses."""
        s = self.shape
        cache = View(0, kv_cache_shape(s.capacity, s.n_kv_heads, s.head_dim), "u8", False)
        rows = View(0, (s.rows, s.n_heads, s.head_dim), "f32", True)
        tree = {"tree_bias": View(0, (s.rows, block_cols), "f32", False)} if self.mask == "tree" else {}
        positions = View(0, (s.rows,), "i32", False)
        return {"q": rows, "k_cache": cache, "v_cache": cache, "positions": positions, **tree, "out": rows}

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        positions: Any,
        out: Any,
        *,
        ctx: int | None = None,
        scale: float | None = None,
        tree_bias: Any = None,
        window: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch. A row that sees more keys than `ctx` covers comes out as NaN, never as a plausible number.

        Args:
            q, k_cache, v_cache, positions, out: arrays of the planned shapes on the device; `out` is written. It lies
                apart from the others, or is the very array q.
            ctx: keys the longest row may see; all that the plan covers when None.
            scale: of the scores; 1 / sqrt(head_dim) when None.
            tree_bias: of a variant with mask="tree".
            window: keys a row sees, of a variant with mask="window".

        Raises:
            InputError: an argument is not what was planned for, or another thread runs the plan. Nothing was launched.
        """
        if not self._running.acquire(False):
            raise InputError(f"another thread runs {self!r}; required: one at a time, make a plan for each thread")
        try:
            self._set(
                self.max_ctx if ctx is None else whole("ctx", ctx, 0, self.max_ctx, self._covers),
                self._scale if scale is None else real("scale", scale),
                window_keys(window),
            )
            view = self.device.view
            views = {
                "q": view("q", q),
                "k_cache": view("k_cache", k_cache),
                "v_cache": view("v_cache", v_cache),
                "positions": view("positions", positions),
                "out": view("out", out),
            }
            if self.mask == "tree":
                views["tree_bias"] = view("tree_bias", tree_bias)
            elif tree_bias is not None:
                raise InputError(f"tree_bias is given, and {self!r} is not planned for a tree; leave it out")
            self._shared.point(views)
            self.device.launch(self.launches, stream)
        finally:
            self._running.release()

    def _set(self, covered: int, scale: float, window: int) -> None:
        """Give scalars and grids new values, where they have changed since the last run."""
        if (covered, scale, window) == self._set_to:
            return
        if bool(window) != (self.mask == "window"):
            raise InputError(f"window is {window}; {self!r} is planned for {self.mask} rows")
        self._set_to = None  # until all of them are known to be right
        for launches in self._batches:
            for bound, extents in zip(launches, self._extents(covered, window), strict=True):
                for name, value in extents.items():
                    bound.set(name, value)
            launches[0].set("scale", scale)
        every = self._bound()
        if self.launches:
            self.launches = [renew(one, bound, self.device) for one, bound in zip(self.launches, every, strict=True)]
        else:
            self.launches = [prepare(bound, self.device) for bound in every]
        self._set_to = (covered, scale, window)


class TilePlan(VerifyPlan):
    """A record for each 128-key tile: the grid follows the keys covered, and the workspace what it may come to."""

    def _extents(self, covered: int, window: int) -> tuple[dict[str, int], dict[str, int]]:
        live = {"live_tiles": tiles(covered)}
        return live | ({"window": window} if self.mask == "window" else {}), live


class SplitPlan(VerifyPlan):
    """A record for each split: grid and workspace are the same for every context."""

    def _extents(self, covered: int, window: int) -> tuple[dict[str, int], dict[str, int]]:
        return {}, {"ctx": covered}


class DirectPlan(VerifyPlan):
    """No records, no workspace: one launch writes the output of all rows, and reads on the device what they see."""

    def _extents(self, covered: int, window: int) -> tuple[dict[str, int], ...]:
        return ({"ctx": covered},)


def workspace_shape(
    variant: Variant,
    multiprocessors: int,
    shape: VerifyShape,
    max_ctx: int,
    partials_rows: int = PARTIALS_ROWS,
    splits: int | None = None,
) -> tuple[int, int, int, int]:
    """Shape of the partials that a plan of these arguments holds, on a device of so many multiprocessors."""
    batch = min(shape.rows, whole("partials_rows", partials_rows, 1, legal="at least 1"))
    if variant.family.records == "split":
        records = splits_of(variant, Site(multiprocessors, shape.n_kv_heads, batch), splits)
        return partials_shape(batch, shape.n_heads, records, shape.head_dim)
    if splits is not None:
        raise InputError(f"splits is {splits}; {variant.name} does not split the context, leave it out")
    if not variant.family.records:
        return (shape.rows, 0, 0, 0)
    return partials_shape(batch, shape.n_heads, tiles(max_ctx), shape.head_dim)


def splits_of(variant: Variant, site: Site, chosen: int | None) -> int:
    """Splits of the context: those chosen, else the default of the family's space.

    Raises:
        InputError: more were chosen than the reducer merges, or none.
    """
    if chosen is None:
        return variant.family.space(variant, site)["splits"][0]
    return whole("splits", chosen, 1, MAX_SPLITS, f"1 .. {MAX_SPLITS}")


def rows_at_once(variant: Variant, partials_rows: int) -> int:
    """Rows of partials that a plan of this variant holds, where `partials_rows` is the limit for records of tiles."""
    return max(partials_rows, SPLIT_ROWS) if variant.family.records == "split" else partials_rows


def reducer(variant: Variant) -> Variant | None:
    """The reducer that merges a variant's records, if it leaves any."""
    if not variant.family.records:
        return None
    tree = dict(variant.params).get("mask") == "tree"
    bound = "splits" if variant.family.records == "split" else "tree" if tree else "causal"
    return families()["attention_flash_reduce_batched"].variant(head_dim=variant.head_dim, bound=bound)


def verify_plan(variant: Variant, device: Device, shape: VerifyShape, max_ctx: int, **options: Any) -> VerifyPlan:
    """The plan of a variant, by what its records cover. Arguments: see `VerifyPlan`."""
    kinds: dict[str, Callable[..., VerifyPlan]] = {"tile": TilePlan, "split": SplitPlan, "": DirectPlan}
    options.setdefault("partials_rows", rows_at_once(variant, PARTIALS_ROWS))
    return kinds[variant.family.records](variant, device, shape, max_ctx, **options)


def check_write(device: Device, k: Any, v: Any, k_cache: Any, v_cache: Any) -> tuple[int, int]:
    """Check the arrays of a KV write; the rows, and the positions of the cache.

    Args:
        k, v: float32 [rows, n_kv_heads, head_dim], at least one row, finite.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].

    Raises:
        InputError: naming the argument, what was seen and what is legal.
    """
    layout = "[rows][n_kv_heads][head_dim]"
    k_shape, v_shape = (_shape(device, name, new, "f32", layout, 3) for name, new in (("k", k), ("v", v)))
    rows, n_kv_heads, head_dim = k_shape
    check_heads(rows, n_kv_heads, n_kv_heads, head_dim, "k")
    if v_shape != k_shape:
        raise InputError(f"v has shape {v_shape}; required: the shape of k, {k_shape}")
    of_cache = f"[capacity][n_kv_heads][head_dim / {Q8_BLOCK}][{Q8_BYTES}]"
    cache = _shape(device, "k_cache", k_cache, "u8", of_cache, 4)
    _check_caches(cache, _shape(device, "v_cache", v_cache, "u8", of_cache, 4), head_dim)
    if cache[1] != n_kv_heads:
        raise InputError(f"k_cache has shape {cache}; required: the {n_kv_heads} KV heads of k")
    for name, new in (("k", k), ("v", v)):
        if isinstance(new, np.ndarray):
            _check_quantizable(name, new)
    return rows, cache[0]


def write_kv(device: Device, k: Any, v: Any, k_cache: Any, v_cache: Any, positions: Any, *, stream: Any = None) -> None:
    """Quantise K and V rows into the cache at their positions, in one launch.

    Args:
        k, v, k_cache, v_cache: see `check_write`; the caches are written, and lie apart from all else.
        positions: int32 [rows], distinct.
    """
    variant = families()["kv_cache_write_q8_0_batched"].variant(pair=True)
    launch(variant, device, stream=stream, k=k, v=v, k_cache=k_cache, v_cache=v_cache, positions=positions)


def _check_quantizable(name: str, rows: npt.NDArray[Any]) -> None:
    """Refuse values that Q8_0 has no code for; a scale of NaN in the cache would spoil every later row."""
    largest = np.abs(rows).max(initial=0.0)
    if not largest <= Q8_MAX:
        raise InputError(f"{name} holds NaN, infinity or a magnitude above {Q8_MAX:.0f}; Q8_0 has no code for it")


def _shape(device: Device, name: str, array: Any, dtype: str, wanted: str, rank: int) -> tuple[int, ...]:
    view = device.view(name, array)
    if view.dtype != dtype:
        raise InputError(f"{name} has dtype {view.dtype}; required: {dtype} {wanted}")
    if len(view.shape) != rank:
        raise InputError(f"{name} has shape {view.shape}; required: {rank} dimensions {wanted}")
    return view.shape
