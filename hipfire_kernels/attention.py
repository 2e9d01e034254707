"""The launches that make one attention call: tile kernel and reducer over sub-batches, the draft kernel, the KV write.

This knows kernels, not routes: the caller says which variant. Everything an argument can be wrong about is refused
here, before the first launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .binding import BoundLaunch, bind, kernel, launch, prepare
from .errors import InputError
from .family import Variant
from .kernels import families
from .layout import MAX_HEAD_DIM, Q8_BLOCK, Q8_BYTES, Q8_MAX, kv_cache_shape, partials_shape, tiles
from .runtime import Device, Launch, View

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
    if k_shape[3] != Q8_BYTES:
        raise InputError(f"k_cache has shape {k_shape}; required: a last extent of {Q8_BYTES}, one Q8_0 block")
    if k_shape[2] * Q8_BLOCK != head_dim:
        raise InputError(
            f"k_cache has shape {k_shape}; required: {head_dim // Q8_BLOCK} blocks for head_dim {head_dim}"
        )
    if v_shape != k_shape:
        raise InputError(f"v_cache has shape {v_shape}; required: the shape of k_cache, {k_shape}")
    return VerifyShape(rows, n_heads, k_shape[1], head_dim, k_shape[0])


def check_heads(rows: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Refuse a row count of zero, a head_dim no kernel has, and query heads that do not divide over the KV heads."""
    if rows == 0:
        raise InputError("q has 0 rows; required: at least one query row")
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


class TilePlan:
    """A tile family and the reducer, ready to run: built, loaded, workspace allocated, arguments packed.

    A plan has one workspace: it is for one stream, and one thread, at a time. After a run, `launches` is what it
    launched.

    Args:
        variant: of `attention_flash_q8_0_tile_batched` or `attention_flash_q8_0_rows`.
        shape: of every call.
        max_ctx: keys that the workspace covers.
        block_cols: columns of the tree bias, for a variant with mask="tree".
        partials_rows: query rows whose partials the workspace holds; more rows go in sub-batches.
        partials: the workspace, float32 `partials_shape(n, ...)` for any n; allocated when None.
    """

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
    ) -> None:
        self.device, self.shape = device, shape
        self.mask = dict(variant.params).get("mask", "causal")
        wanted = partials_shape(min(shape.rows, partials_rows), shape.n_heads, tiles(max_ctx), shape.head_dim)
        self.partials = device.empty(wanted, np.float32) if partials is None else partials
        held = device.view("partials", self.partials)
        if held.dtype != "f32" or held.shape[1:] != wanted[1:] or not held.shape[0]:
            raise InputError(
                f"partials has dtype {held.dtype} and shape {held.shape}; required: f32 {('rows', *wanted[1:])}"
            )
        self.max_ctx = max_ctx
        self.workspace_bytes = 4 * math.prod(held.shape)
        reducer = families()["attention_flash_reduce_batched"].variant(
            head_dim=shape.head_dim, tree=self.mask == "tree"
        )
        for part in (variant, reducer):
            kernel(part, device)
        self._scale = 1 / math.sqrt(shape.head_dim)
        self._set_to: tuple[int, float, int] | None = None
        self.launches: list[Launch] = []
        self._batches = [
            self._bind(variant, reducer, held, first, min(held.shape[0], shape.rows - first), block_cols)
            for first in range(0, shape.rows, held.shape[0])
        ]
        for pair in self._batches:
            for bound in pair:
                bound.args.keeps = self.partials

    def _bind(
        self, variant: Variant, reducer: Variant, partials: View, first_row: int, batch: int, block_cols: int
    ) -> tuple[BoundLaunch, BoundLaunch]:
        s = self.shape
        cache = View(0, kv_cache_shape(s.capacity, s.n_kv_heads, s.head_dim), "u8", False)
        rows = View(0, (s.rows, s.n_heads, s.head_dim), "f32", True)
        positions = View(0, (s.rows,), "i32", False)
        tree = {"tree_bias": View(0, (s.rows, block_cols), "f32", False)} if self.mask == "tree" else {}
        common = {"first_row": first_row, "batch": batch}
        tile = bind(
            variant,
            {"q": rows, "k_cache": cache, "v_cache": cache, "positions": positions, "partials": partials, **tree},
            **common,
            live_tiles=1,
            scale=1.0,
            **({"window": 1} if self.mask == "window" else {}),
        )
        views = {"partials": partials, "positions": positions, "out": rows}
        merge = bind(reducer, views, **common, live_tiles=1, **({"block_cols": block_cols} if tree else {}))
        return tile, merge

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
            q, k_cache, v_cache, positions, out: arrays of the planned shapes on the device; `out` is written.
            ctx: keys the longest row may see; the grid covers these. All that the workspace covers when None.
        """
        covered = self.max_ctx if ctx is None else ctx
        if not 0 <= covered <= self.max_ctx:
            raise InputError(f"ctx is {covered}; the plan's workspace covers {self.max_ctx} keys")
        factor = self._scale if scale is None else scale
        self._set(covered, factor, window)
        view = self.device.view
        to = view("out", out)
        if not to.writable:
            raise InputError("out is read-only; the kernel writes it")
        at = view("positions", positions)
        inputs = [("q", view("q", q)), ("k_cache", view("k_cache", k_cache)), ("v_cache", view("v_cache", v_cache))]
        if self.mask == "tree":
            inputs.append(("tree_bias", view("tree_bias", tree_bias)))
        for tile, merge in self._batches:
            for name, found in inputs:
                tile.point(name, found)
            tile.point("positions", at)
            merge.point("positions", at)
            merge.point("out", to)
        self.device.launch(self.launches, stream)

    def _set(self, covered: int, scale: float, window: int) -> None:
        """Give scalars and grids new values, where they have changed since the last run."""
        if (covered, scale, window) == self._set_to:
            return
        if not math.isfinite(scale):
            raise InputError(f"scale is {scale}; required: a finite number")
        for tile, merge in self._batches:
            tile.set("live_tiles", tiles(covered))
            merge.set("live_tiles", tiles(covered))
            tile.set("scale", scale)
            if self.mask == "window":
                tile.set("window", window)
        self.launches = [prepare(bound, self.device) for pair in self._batches for bound in pair]
        self._set_to = (covered, scale, window)


def draft_attend_rows(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    scale: float | None = None,
    window: int = 0,
    causal: bool = False,
    stream: Any = None,
) -> None:
    """Run the scalar draft kernel: `attention_dflash_f32`, or its sliding form for a window or a causal mask.

    Args:
        q: float32 [rows, n_heads, head_dim]; k, v: float32 [keys, n_kv_heads, head_dim], context then block.
        out: float32, the shape of q; written.
        window: 0 for none; else keys at a distance of `window` or more are hidden.
    """
    rows, n_heads, head_dim = _shape(device, "q", q, "f32", "[rows][n_heads][head_dim]", 3)
    k_shape = _shape(device, "k", k, "f32", "[keys][n_kv_heads][head_dim]", 3)
    v_shape = _shape(device, "v", v, "f32", "[keys][n_kv_heads][head_dim]", 3)
    check_heads(rows, n_heads, k_shape[1], head_dim)
    if v_shape != k_shape:
        raise InputError(f"v has shape {v_shape}; required: the shape of k, {k_shape}")
    if k_shape[2] != head_dim:
        raise InputError(f"k has shape {k_shape}; required: the head_dim of q, {head_dim}")
    if k_shape[0] < rows:
        raise InputError(
            f"k has {k_shape[0]} keys for {rows} query rows; required: context and block, at least the rows"
        )
    if window < 0:
        raise InputError(f"window is {window}; required: 0 for none, or a number of keys")
    sliding = bool(window or causal)
    variant = families()["attention_dflash_f32"].variant(head_dim=head_dim, sliding=sliding)
    span = {"window": window or k_shape[0] + rows, "causal": int(causal)} if sliding else {}
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    launch(variant, device, stream=stream, q=q, k=k, v=v, out=out, scale=factor, **span)


def write_kv(device: Device, k: Any, v: Any, k_cache: Any, v_cache: Any, positions: Any, *, stream: Any = None) -> None:
    """Quantise K and V rows into the cache at their positions, in one launch.

    Args:
        k, v: float32 [rows, n_kv_heads, head_dim], finite.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34]; written.
        positions: int32 [rows], distinct.
    """
    rows, n_kv_heads, head_dim = _shape(device, "k", k, "f32", "[rows][n_kv_heads][head_dim]", 3)
    check_heads(rows, n_kv_heads, n_kv_heads, head_dim)
    blocks = _shape(device, "k_cache", k_cache, "u8", f"[capacity][n_kv_heads][head_dim / 32][{Q8_BYTES}]", 4)[2]
    if blocks * Q8_BLOCK != head_dim:
        raise InputError(
            f"k_cache has {blocks} blocks a head; required: {head_dim // Q8_BLOCK} for head_dim {head_dim}"
        )
    for name, new in (("k", k), ("v", v)):
        if isinstance(new, np.ndarray):
            _check_quantizable(name, new)
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
