"""What an output may be where the exact result, or the range of the arithmetic, is no number.

The oracle says what is exact (`reference`). An element without an exact value must not be finite. A row whose elements
all have one must have it, within the tolerance. No finite element may ever be wrong. Which not finite value it is, and
what else of a row with elements that have none is not finite, is left to the kernel.

A row is excused from being finite, never from being right, where it reads what its kernel declares to be too large
(`Tensor.largest`), or where scores leave the range of float32 (`beyond_f32`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Tensor, Variant
from hipfire_kernels.checking.reference import decode_cache

Array = npt.NDArray[Any]

F32_MAX = float(np.finfo(np.float32).max)

SCORE_LIMIT = 2.0**127
"""Products of a score add up to less than this in magnitude, in units of log2, where it must be a number."""

LEAST_SCALE = 2.0**-16
"""A smaller scale of the scores does not widen the range: kernels add products up before they apply it."""


def misfits(got: Array, want: Array, excused: Array | None = None) -> Array:
    """Where an output is a number and must not be, or is none and must be.

    Args:
        got, want: [..., dims]; want is the oracle's.
        excused: bool [...], rows that need not be finite.

    Returns:
        bool [..., dims].
    """
    number, exact = np.isfinite(got), np.isfinite(want)
    owed: Array = np.all(exact, axis=-1)
    if excused is not None:
        owed = owed & ~excused
    return (number & ~exact) | (~number & owed[..., None])


def misfit(got: Array, want: Array, excused: Array | None = None) -> str:
    """Words on the first of `misfits` of an output [rows, heads, dims]; empty where there is none."""
    wrong = misfits(got, want, excused)
    if not wrong.any():
        return ""
    row, head, dim = (int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{got[row, head, dim]} at row {row}, head {head}, dim {dim}, where the oracle has "
        f"{want[row, head, dim]:.6g}; {int(wrong.sum())} of {wrong.size} elements are of the wrong kind"
    )


def row_errors(
    got: Array, want: Array, excused: Array | None = None, spread: Array | float = 0.0
) -> npt.NDArray[np.float64]:
    """max|diff| / (max|want| + spread) over the elements of a row that are numbers.

    Infinite for a row with one of `misfits`, or where a row that must be zero is not.
    """
    told = np.isfinite(want) & np.isfinite(got)
    diff = np.abs(np.where(told, got, 0).astype(np.float64) - np.where(told, want, 0)).max(axis=-1, initial=0.0)
    size = np.abs(np.where(np.isfinite(want), want, 0)).max(axis=-1, initial=0.0) + spread
    ratio = np.where(size > 0, diff / np.where(size > 0, size, 1), np.where(diff > 0, np.inf, 0))
    return np.where(misfits(got, want, excused).any(axis=-1), np.inf, ratio)


def worst_row(got: Array, want: Array, excused: Array | None = None, spread: Array | float = 0.0) -> float:
    """The worst of `row_errors`."""
    return float(row_errors(got, want, excused, spread).max(initial=0.0))


# ---- the range of the arithmetic ------------------------------------------------------------------------------------


def largest_of(variant: Variant) -> dict[str, float]:
    """Tensor name to the largest magnitude that the variant declares for it, where it declares one."""
    tensors = [arg for arg in variant.args if isinstance(arg, Tensor)]
    return {arg.name.removesuffix("_cache"): arg.largest for arg in tensors if math.isfinite(arg.largest)}


def reach(cache: Array) -> Array:
    """Of Q8_0 blocks [keys, n_kv_heads, head_dim // 32, 34], the largest magnitude that each scale can bring, as
    [keys, n_kv_heads, head_dim]."""
    furthest = cache.copy()
    furthest[..., 2:] = 0x80  # -128
    return np.abs(decode_cache(furthest))


def excused(
    q: Array,
    keys: tuple[Array, Array],
    values: Array,
    visible: Array,
    scale: float,
    bias: Array | None,
    largest: Mapping[str, float],
) -> Array:
    """Rows of one call that need not be finite: they read what is too large for the kernel, or have scores that are.

    Args:
        q: [rows, n_heads, head_dim].
        keys: K [keys, n_kv_heads, head_dim], and the magnitudes that count against its largest.
        values: those of V.
        visible: bool [rows, keys].
        scale: of the scores.
        bias: [rows, keys], or None.
        largest: `largest_of` the variant.

    Returns:
        bool [rows, n_heads].
    """
    n_heads = q.shape[1]
    k, k_reach = (np.nan_to_num(np.abs(x.astype(np.float64)), posinf=0.0) for x in keys)
    v_reach = np.nan_to_num(np.abs(values.astype(np.float64)), posinf=0.0)
    size = np.nan_to_num(np.abs(q.astype(np.float64)), posinf=0.0)
    group = n_heads // k.shape[1]
    log2e = math.log2(math.e)
    found: Array = np.any(size * abs(scale) * log2e > largest.get("q", math.inf), axis=-1)
    large: Array = np.any(k_reach > largest.get("k", math.inf), axis=-1)
    large = large | np.any(v_reach > largest.get("v", math.inf), axis=-1)
    shift = 0.0 if bias is None else np.abs(np.where(np.isfinite(bias), bias, 0.0)) * log2e
    for head in range(n_heads):
        sums = size[:, head] @ k[:, head // group].T * (max(abs(scale), LEAST_SCALE) * log2e) + shift
        found[:, head] |= (visible & ((sums >= SCORE_LIMIT) | large[:, head // group])).any(axis=1)
    return found
