"""The launches that make one attention call: tile kernel and reducer over sub-batches, the draft kernel, the KV write.

This knows kernels, not routes: the caller says which variant. Everything an argument can be wrong about is refused
here, before the first launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runtime import Device
from .errors import InputError
from .family import Variant
from .kernels import families
from .binding import launch
from .layout import MAX_HEAD_DIM, Q8_BLOCK, Q8_BYTES, Q8_MAX, partials_shape, tiles

PARTIALS_ROWS = 16
"""Query rows whose partials are held at once; more rows go in sub-batches. One speculative block of 16 in one go."""


@dataclass(frozen=True)
class VerifyShape:
    """The extents of one verify-attention call."""

    rows: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int


def check_verify(device: Device, q: Any, k_cache: Any, v_cache: Any, positions: Any) -> VerifyShape:
    """Check the arrays of a verify-attention call.

    Args:
        q: float32 [rows, n_heads, head_dim], at least one row.
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: int32 [rows].

    Raises:
        InputError: naming the argument, what was seen and what is legal.
    """
    rows, n_heads, head_dim = _shape(device, "q", q, "f32", "[rows][n_heads][head_dim]", 3)
    k_shape = _shape(device, "k_cache", k_cache, "u8", f"[capacity][n_kv_heads][head_dim / 32][{Q8_BYTES}]", 4)
    v_shape = _shape(device, "v_cache", v_cache, "u8", f"[capacity][n_kv_heads][head_dim / 32][{Q8_BYTES}]", 4)
    (n_positions,) = _shape(device, "positions", positions, "i32", "[rows]", 1)
    check_heads(rows, n_heads, k_shape[1], head_dim)
    if k_shape[3] != Q8_BYTES:
        raise InputError(f"k_cache has shape {k_shape}; required: a last extent of {Q8_BYTES}, one Q8_0 block")
    if k_shape[2] * Q8_BLOCK != head_dim:
        raise InputError(f"k_cache has shape {k_shape}; required: {head_dim // Q8_BLOCK} blocks for head_dim {head_dim}")
    if v_shape != k_shape:
        raise InputError(f"v_cache has shape {v_shape}; required: the shape of k_cache, {k_shape}")
    if n_positions != rows:
        raise InputError(f"positions has {n_positions} entries; required: one for each of the {rows} rows of q")
    return VerifyShape(rows, n_heads, k_shape[1], head_dim, k_shape[0])


def check_heads(rows: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Refuse a row count of zero, a head_dim no kernel has, and query heads that do not divide over the KV heads."""
    if rows == 0:
        raise InputError("q has 0 rows; required: at least one query row")
    if head_dim % Q8_BLOCK or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InputError(f"head_dim is {head_dim}; required: a multiple of {Q8_BLOCK} up to {MAX_HEAD_DIM}")
    if n_kv_heads == 0 or n_heads == 0 or n_heads % n_kv_heads:
        raise InputError(f"n_heads is {n_heads} with {n_kv_heads} KV heads; required: a positive multiple of the KV heads")


def check_positions(positions: np.ndarray[Any, np.dtype[np.int32]], capacity: int, *, least: int = -1) -> int:
    """Refuse a position outside the cache; return the live context, the largest position + 1.

    A position of -1 sees no key (its output row is zero); writing needs `least` 0.
    """
    low, high = int(positions.min()), int(positions.max())
    if low < least or high >= capacity:
        wrong = low if low < least else high
        raise InputError(f"positions holds {wrong}; required: {least} .. {capacity - 1} for a cache of {capacity} positions")
    return high + 1


def attend_tiles(
    variant: Variant,
    device: Device,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    out: Any,
    *,
    ctx: int,
    scale: float | None = None,
    tree_bias: Any = None,
    window: int = 0,
    partials: Any = None,
    stream: Any = None,
) -> None:
    """Run a tile family and the reducer, in sub-batches of as many rows as the partials hold.

    Args:
        variant: of `attention_flash_q8_0_tile_batched` or `attention_flash_q8_0_rows`.
        out: float32, the shape of q; written.
        ctx: keys that the grid and the partials stride cover: the live context, or the capacity for a captured launch.
        tree_bias: float32 [rows, block_cols] for a variant with mask="tree".
        window: keys a row sees, for a variant with mask="window".
        partials: workspace, float32 `partials_shape(n, ...)`, n of any size; allocated when None.
    """
    shape = check_verify(device, q, k_cache, v_cache, positions)
    max_tiles = tiles(ctx)
    if partials is None:
        held = min(shape.rows, PARTIALS_ROWS)
        partials = device.empty(partials_shape(held, shape.n_heads, max_tiles, shape.head_dim), np.float32)
    step = partials.shape[0]
    mask = dict(variant.params).get("mask", "causal")
    masking = {"tree": {"tree_bias": tree_bias}, "window": {"window": window}, "causal": {}}[mask]
    merging = {"block_cols": tree_bias.shape[1]} if mask == "tree" else {}
    reducer = families()["attention_flash_reduce_batched"].variant(head_dim=shape.head_dim, tree=mask == "tree")
    factor = 1 / math.sqrt(shape.head_dim) if scale is None else scale
    for first_row in range(0, shape.rows, step):
        batch = min(step, shape.rows - first_row)
        launch(
            variant, device, stream=stream, q=q, k_cache=k_cache, v_cache=v_cache, positions=positions,
            partials=partials, first_row=first_row, batch=batch, live_tiles=max_tiles, scale=factor, **masking,
        )  # fmt: skip
        launch(
            reducer, device, stream=stream, partials=partials, positions=positions, out=out,
            first_row=first_row, batch=batch, **merging,
        )  # fmt: skip


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
        raise InputError(f"k has {k_shape[0]} keys for {rows} query rows; required: context and block, at least the rows")
    if window < 0:
        raise InputError(f"window is {window}; required: 0 for none, or a number of keys")
    sliding = bool(window or causal)
    variant = families()["attention_dflash_f32"].variant(head_dim=head_dim, sliding=sliding)
    span = {"window": window or k_shape[0] + rows, "causal": int(causal)} if sliding else {}
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    launch(variant, device, stream=stream, q=q, k=k, v=v, out=out, scale=factor, **span)


def write_kv(
    device: Device, k: Any, v: Any, k_cache: Any, v_cache: Any, positions: Any, *, stream: Any = None
) -> None:
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
        raise InputError(f"k_cache has {blocks} blocks a head; required: {head_dim // Q8_BLOCK} for head_dim {head_dim}")
    for name, rows_of in (("k", k), ("v", v)):
        _check_quantizable(name, device.to_host(rows_of))
    variant = families()["kv_cache_write_q8_0_batched"].variant(pair=True)
    launch(variant, device, stream=stream, k=k, v=v, k_cache=k_cache, v_cache=v_cache, positions=positions)


def _check_quantizable(name: str, rows: np.ndarray[Any, Any]) -> None:
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
