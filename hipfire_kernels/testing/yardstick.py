"""What a case allows: the family's tolerance, in units that grow where the arithmetic itself cannot know better.

A tolerance is declared for well-behaved inputs. Where scores are sums of large terms, or values cancel, the best
kernel of a precision is further off, relative to the result, than that. To first order, with weights w, scores of
products that add up to a in magnitude, and every product off by u, the output moves by the sum of
w expm1(u (a + a_top)) (|v| + |out|) over all keys but the heaviest: an error of its score is none where its weight is
all there is. Rounding of the weighted sum adds a share of sum w |v|; weights below the smallest number are lost.

What has no exact value, and which rows need not be finite, `checking.numbers` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import F32_MAX, excused, misfit, reach, worst_row
from hipfire_kernels.testing.requests import DraftRequest, Request

Array = npt.NDArray[Any]

F16_STEP = 2.0**-12
"""A tolerance above half a unit of f16 is that of a kernel whose products have f16 factors."""

_MOST = 60.0
"""exp of more is no information; it only overflows."""


@dataclass(frozen=True)
class Precision:
    """What a tolerance says about the arithmetic behind it: `product`, the relative error of a product in a score;
    `tiny`, the weights that may be lost; `share`, the relative error of a weighted value."""

    product: float
    tiny: float
    share: float

    @staticmethod
    def of(tolerance: float, least_weight: float = 0.0) -> Precision:
        """Weights below `least_weight` may be lost in any case. A sixty-fourth of the tolerance of f32 kernels is 2.6
        units of f32; half of that of f16 kernels is one, and a third half a unit for each of the two factors of a
        weighted value."""
        if tolerance > F16_STEP:
            return Precision(tolerance / 2, max(2.0**-24, least_weight), tolerance / 3)
        return Precision(tolerance / 64, max(2.0**-125, least_weight), tolerance / 16)


@dataclass(frozen=True, eq=False)
class Expected:
    """What a call must give.

    Attributes:
        out: float64 [rows, n_heads, head_dim], the oracle's.
        spread: float64 [rows, n_heads], how far inputs of the case may throw off a kernel of the precision.
        excused: bool [rows, n_heads], which rows need not be finite.
        lost: float64 [rows, n_heads], what may vanish in weights that are too small. A row that has more is not zero.
    """

    out: Array
    spread: Array
    excused: Array
    lost: Array


NOTHING: Mapping[str, float] = MappingProxyType({})


def expected(
    request: Request | DraftRequest,
    tolerance: float,
    largest: Mapping[str, float] = NOTHING,
    least_weight: float = 0.0,
) -> Expected:
    """The oracle's result of a request, and its spread at a tolerance.

    Args:
        largest: magnitudes of q, k and v above which a row that reads them need not be finite.
        least_weight: see `Tolerance`.
    """
    if isinstance(request, Request):
        r = request
        out = reference.attend(r.q, r.k_cache, r.v_cache, r.positions, r.scale, r.tree_bias, r.window)
        caches = [cache[: r.ctx] for cache in (r.k_cache, r.v_cache)]
        keys, values = (reference.decode_cache(cache) for cache in caches)
        k_reach, v_reach = (reach(cache) for cache in caches)
    else:
        out = reference.draft_attend(request.q, request.k, request.v, request.scale, request.window, request.causal)
        keys, values = request.k.astype(np.float64), request.v.astype(np.float64)
        k_reach, v_reach = keys, values
    visible = request.visible()
    bias = np.zeros(visible.shape)
    if isinstance(request, Request) and request.tree_bias is not None:
        bias[:, int(request.positions[0]) :] = request.tree_bias
    bias[~visible] = -np.inf
    let = excused(request.q, (keys, k_reach), v_reach, visible, request.factor, bias, largest)
    let |= np.nan_to_num(abs(out)).max(axis=-1, initial=0.0) * (1 + tolerance) > F32_MAX
    spread, lost = np.zeros(out.shape[:2]), np.zeros(out.shape[:2])
    if visible.shape[1]:
        group = out.shape[1] // keys.shape[1]
        for kv_head in range(keys.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q = np.nan_to_num(request.q[:, heads].astype(np.float64), posinf=0.0, neginf=0.0) * request.factor
            precision = Precision.of(tolerance, least_weight)
            found = _spread(q, keys[:, kv_head], values[:, kv_head], bias, out[:, heads], precision)
            spread[:, heads], lost[:, heads] = found
    return Expected(out, spread, let, lost)


def _spread(q: Array, keys: Array, values: Array, bias: Array, out: Array, precision: Precision) -> tuple[Array, Array]:
    """`spread` and `lost` [rows, group] for the heads of one KV head: q [rows, group, d] with the scale in it, bias
    [rows, keys].

    What is no finite number counts as 0: nothing is measured where a row reads it.
    """
    rows, group, dim = q.shape
    keys, values, out = (np.where(np.isfinite(x), x, 0.0) for x in (keys, values, out))
    flat = q.reshape(rows * group, dim)
    seen = np.repeat(~np.isneginf(bias), group, axis=0)
    offset = np.repeat(np.where(np.isfinite(bias), bias, 0.0), group, axis=0)
    scores = np.where(seen, flat @ keys.T + offset, -np.inf)
    size = abs(flat) @ abs(keys).T + abs(offset)
    top = scores.argmax(axis=1)[:, None]
    highest = np.take_along_axis(scores, top, axis=1)
    below = scores - np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(below)
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    off = precision.product * (size + np.take_along_axis(size, top, axis=1))
    # Far off, a weight that is nothing may become all there is.
    moved = np.where(off < _MOST, weights * np.expm1(np.minimum(off, _MOST)), np.exp(np.minimum(below + off, _MOST)))
    moved, weights = moved / total, weights / total
    np.put_along_axis(moved, top, 0.0, axis=1)
    lost = (seen * precision.tiny) @ abs(values)
    factors = moved + weights * precision.share
    terms = factors @ abs(values) + lost + moved.sum(axis=1, keepdims=True) * abs(out.reshape(rows * group, dim))
    worst, vanished = (np.nan_to_num(x, nan=0.0).max(axis=1).reshape(rows, group) for x in (terms, lost))
    return worst, vanished


def error_of(got: Array, want: Expected, tolerance: float) -> tuple[float, str]:
    """The error of the worst (row, head), to be held against the tolerance, and what is wrong in kind, if anything.

    Kinds come first: an element that has no exact value must be none, a row that has one must be finite, and zero only
    where nothing is left of it.
    """
    if got.shape != want.out.shape:
        return math.inf, f"the output has shape {got.shape}; required: {want.out.shape}"
    wrong = misfit(got, want.out, want.excused)
    vanished = (got == 0).all(axis=-1) & (np.nan_to_num(abs(want.out)).max(axis=-1, initial=0.0) > want.lost)
    if vanished.any() and not wrong:
        row, head = (int(i) for i in np.argwhere(vanished)[0])
        wrong = f"row {row}, head {head} is zero, where the oracle has up to {abs(want.out[row, head]).max():.6g}"
    return worst_row(got, want.out, want.excused, want.spread / tolerance), wrong
