"""The oracle: what every kernel must equal, in float64 numpy.

It shares no code with the kernels or with `q8_0`: it knows the documented layouts only.

What exact means where an input is no finite number: a result is one of numbers. So a row that reads NaN or
an infinity in q, in K of a key it sees, or in its tree bias has none, and all its elements are NaN here; an element has
none where V of a key that the row sees is NaN or infinite. Every key that a row sees has a weight, however small: V is
read even where float64 rounds the weight to 0. A bias of -inf hides its key: then neither K nor V of it is read. Which
kind of not finite a kernel gives is left to it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def decode_cache(cache: npt.NDArray[np.uint8]) -> F64:
    """A Q8_0 cache [capacity, n_kv_heads, head_dim // 32, 34] as float64 [capacity, n_kv_heads, head_dim].

    The scale is assembled bit by bit from its two bytes (sign, 5-bit exponent, 10-bit fraction).
    """
    bits = cache[..., 0].astype(np.int64) | cache[..., 1].astype(np.int64) << 8
    sign = np.where(bits >> 15, -1.0, 1.0)
    exponent, fraction = bits >> 10 & 31, (bits & 1023).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scale = np.where(exponent == 0, fraction * 2.0**-24, (1024 + fraction) * 2.0 ** (exponent - 25.0))
        scale = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), scale) * sign
    codes = cache[..., 2:].astype(np.float64)
    codes = np.where(codes > 127, codes - 256, codes)
    with np.errstate(invalid="ignore"):
        values = scale[..., None] * codes
    return values.reshape(*cache.shape[:-2], cache.shape[-2] * 32)


def _softmax(scores: F64, visible: npt.NDArray[np.bool_], values: F64) -> F64:
    """softmax over the visible keys, times the values. A row with no visible key gives zeros.

    Args:
        scores, visible: [rows, keys]; values: [keys, head_dim].
    """
    unknown: npt.NDArray[np.bool_] = np.any(visible & ~np.isfinite(scores), axis=1)
    scores = np.where(visible & ~unknown[:, None], scores, -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=1, keepdims=True)
    usable = np.isfinite(values)
    out = weights @ np.where(usable, values, 0.0) / np.where(total == 0, 1.0, total)
    spoiled = visible.astype(np.float64) @ (~usable).astype(np.float64) > 0
    return np.where(spoiled | unknown[:, None], np.nan, out)


def attend(
    q: npt.NDArray[Any],
    k_cache: npt.NDArray[np.uint8],
    v_cache: npt.NDArray[np.uint8],
    positions: npt.NDArray[Any],
    scale: float | None = None,
    tree_bias: npt.NDArray[Any] | None = None,
    window: int = 0,
) -> F64:
    """Verify attention over a Q8_0 cache.

    Row r sees keys 0 .. positions[r]; with a window W only the last W of them. With a tree bias of shape
    [rows, block_cols] every row sees keys 0 .. positions[0] + block_cols - 1, the last block_cols of them with the
    bias added to the score (-inf hides a key).

    Args:
        q: [rows, n_heads, head_dim].
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: [rows], the cache slot of each row; -1 sees no key.
        scale: of the scores; 1 / sqrt(head_dim) by default.

    Returns:
        float64 [rows, n_heads, head_dim].
    """
    rows, n_heads, head_dim = q.shape
    bounds = np.asarray(positions, np.int64) + 1
    start = int(positions[0])
    if tree_bias is not None:
        bounds = np.full(rows, start + tree_bias.shape[1])
    end = int(bounds.max())
    key = np.arange(end)
    visible = key < bounds[:, None]
    if window:
        visible &= key >= bounds[:, None] - window
    bias = np.zeros((rows, end))
    if tree_bias is not None:
        bias[:, start:] = tree_bias
        visible &= ~np.isneginf(bias)
    keys, values = decode_cache(k_cache[:end]), decode_cache(v_cache[:end])
    factor = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    group = n_heads // k_cache.shape[1]
    out = np.zeros(q.shape)
    for head in range(n_heads):
        with np.errstate(invalid="ignore"):
            scores = q[:, head].astype(np.float64) @ keys[:, head // group].T * factor + bias
        out[:, head] = _softmax(scores, visible, values[:, head // group])
    return out


def draft_attend(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    scale: float | None = None,
    window: int = 0,
    causal: bool = False,
) -> F64:
    """Draft attention: row i stands at position keys - rows + i, keys are context then block.

    Non-causal rows see every key. A window W hides keys W or more positions away, before or behind; causal hides
    every key behind the row.

    Args:
        q: [rows, n_heads, head_dim]; k, v: [keys, n_kv_heads, head_dim].

    Returns:
        float64 [rows, n_heads, head_dim].
    """
    rows, n_heads, head_dim = q.shape
    total, n_kv_heads = k.shape[:2]
    ahead = (total - rows + np.arange(rows))[:, None] - np.arange(total)  # position of the row minus that of the key
    visible = np.full((rows, total), True)
    if causal:
        visible &= ahead >= 0
    if window:
        visible &= abs(ahead) < window
    factor = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    out = np.zeros(q.shape)
    for head in range(n_heads):
        kv_head = head * n_kv_heads // n_heads
        with np.errstate(invalid="ignore"):
            scores = q[:, head].astype(np.float64) @ k[:, kv_head].astype(np.float64).T * factor
        out[:, head] = _softmax(scores, visible, v[:, kv_head].astype(np.float64))
    return out


def merge(partials: npt.NDArray[Any], n_tiles: npt.NDArray[Any]) -> F64:
    """Merge partial records.

    Args:
        partials: [rows, n_heads, max_tiles, 2 + head_dim] of {tile_max, tile_sum, out}.
        n_tiles: [rows], the records of each row that count.

    Returns:
        float64 [rows, n_heads, head_dim]; zeros where every record has the sum 0, that of no key. NaN for a row with a
        record whose maximum or sum is not finite, and in the elements where `out` of a record is not.
    """
    rows, n_heads, _, record = partials.shape
    out = np.zeros((rows, n_heads, record - 2))
    for row in range(rows):
        for head in range(n_heads):
            records = partials[row, head, : int(n_tiles[row])].astype(np.float64)
            live = records[records[:, 1] != 0]
            if not len(live):
                continue
            if not np.isfinite(live[:, :2]).all():
                out[row, head] = np.nan
                continue
            weights = np.exp(live[:, 0] - live[:, 0].max())
            usable = np.isfinite(live[:, 2:])
            merged = weights @ np.where(usable, live[:, 2:], 0.0) / (weights @ live[:, 1])
            out[row, head] = np.where(usable.all(axis=0), merged, np.nan)
    return out


def check_quantized(x: npt.NDArray[Any], blocks: npt.NDArray[np.uint8]) -> float:
    """How far Q8_0 blocks are from what x asks for, in units of what rounding allows; at most 1 when right.

    A block of x that holds NaN or infinity must read as no finite number in all its values, one with a magnitude above
    what the largest scale can hold at least in that value. The stored scale may be half an f16 step from amax / 127
    (2^-25 in the subnormal range), a code half a unit from x * 127 / amax, with a relative 2^-20 on top for the float32
    arithmetic of the writer.

    Args:
        x: [..., n]; blocks: uint8 [..., n // 32, 34].
    """
    values = x.astype(np.float64).reshape(*blocks.shape[:-1], 32)
    read = decode_cache(blocks).reshape(values.shape)
    broken = ~np.isfinite(values).all(axis=-1)
    if np.isfinite(read[broken]).any() or np.isfinite(read[abs(values) > 127 * 65520.0]).any():
        return math.inf
    amax = np.where(broken, 0.0, abs(values).max(axis=-1))
    held = ~broken & (amax < 127 * 65520.0)  # else the scale rounds to infinity
    values, amax, blocks = values[held], amax[held], blocks[held]
    unit = np.ones_like(blocks)
    unit[..., :2] = blocks[..., :2]
    scale = decode_cache(unit[:, None])[:, ::32]
    scale_error = np.abs(scale.reshape(amax.shape) - amax / 127) / np.maximum(amax / 127 * 2.0**-11, 2.0**-25)
    codes = blocks[..., 2:].astype(np.float64)
    codes = np.where(codes > 127, codes - 256, codes)
    # Where the stored scale is zero the block is zero whatever its codes are.
    wanted = values * np.where(amax > 1e-36, 127 / np.maximum(amax, 1e-36), 0)[..., None]
    code_error = np.abs(codes - wanted) / 0.5
    return float(max(scale_error.max(initial=0.0), code_error.max(initial=0.0)) / (1 + 2.0**-13))
