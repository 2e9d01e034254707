"""Named contents: of q, K, V, positions and tree bias, and of the memory no row may see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.checking.numbers import F32_MAX
from hipfire_kernels.layout import Q8_BLOCK
from hipfire_kernels.q8_0 import quantize_q8_0, random_q8_0

Array = npt.NDArray[Any]
Rng = np.random.Generator
Shape = tuple[int, ...]


# ---- Q8_0 blocks ----------------------------------------------------------------------------------------------------


def _with_scales(blocks: Array, scales: Array) -> Array:
    blocks[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    return blocks


def _normal(rng: Rng, shape: Shape) -> Array:
    return quantize_q8_0(rng.standard_normal((*shape[:-1], Q8_BLOCK), np.float32)).reshape(shape)


def _zeros(rng: Rng, shape: Shape) -> Array:
    return np.zeros(shape, np.uint8)


def _zero_scale(rng: Rng, shape: Shape) -> Array:
    return _with_scales(random_q8_0(rng, shape), rng.choice(np.array([0.0, -0.0]), shape[:-1]))


def _subnormal(rng: Rng, shape: Shape) -> Array:
    return _with_scales(random_q8_0(rng, shape), rng.integers(1, 1024, shape[:-1]) * 2.0**-24)


def _negative(rng: Rng, shape: Shape) -> Array:
    return _with_scales(random_q8_0(rng, shape), -rng.uniform(0.001, 0.02, shape[:-1]))


def _huge(rng: Rng, shape: Shape) -> Array:
    return _with_scales(random_q8_0(rng, shape), rng.choice(np.array([65504.0, -65504.0]), shape[:-1]))


LARGEST_Q8 = 128 * 65504.0
"""The largest magnitude that a Q8_0 block can stand for; no writer of our own makes the code -128."""


def _largest(rng: Rng, shape: Shape) -> Array:
    blocks = _huge(rng, shape)
    blocks[..., 2:] = rng.choice(np.array([0x80, 0x7F, 0x01, 0x00], np.uint8), (*shape[:-1], Q8_BLOCK))
    return blocks


def _minus128(rng: Rng, shape: Shape) -> Array:
    blocks = random_q8_0(rng, shape)
    blocks[..., 2:] = 0x80
    return blocks


def _alternating(rng: Rng, shape: Shape) -> Array:
    blocks = random_q8_0(rng, shape)
    signs = np.indices((*shape[:-1], Q8_BLOCK)).sum(axis=0) % 2
    blocks[..., 2:] = np.where(signs, np.uint8(0x7F), np.uint8(0x81))
    return blocks


def _one_hot(rng: Rng, shape: Shape) -> Array:
    blocks = np.zeros(shape, np.uint8)
    heads = blocks.reshape(-1, *shape[-2:])
    at = rng.integers(0, shape[-2] * Q8_BLOCK, len(heads))
    heads[np.arange(len(heads)), at // Q8_BLOCK, 2 + at % Q8_BLOCK] = 127
    return _with_scales(blocks, np.full(shape[:-1], 1 / 127))


def _same(rng: Rng, shape: Shape) -> Array:
    return np.repeat(_normal(rng, (1, *shape[1:])), shape[0], axis=0)


def _mixed(rng: Rng, shape: Shape) -> Array:
    """Every block of another kind: what a cache of another writer may hold."""
    kinds = [make(rng, shape) for name, make in CACHES.items() if name not in ("mixed", "same")]
    return np.choose(rng.integers(0, len(kinds), shape[:-1])[..., None], kinds)


CACHES: Mapping[str, Callable[[Rng, Shape], Array]] = {
    "normal": _normal,
    "zeros": _zeros,
    "zero_scale": _zero_scale,
    "subnormal": _subnormal,
    "negative": _negative,
    "huge": _huge,
    "largest": _largest,
    "minus128": _minus128,
    "alternating": _alternating,
    "one_hot": _one_hot,
    "same": _same,
    "mixed": _mixed,
}
"""Named contents of a cache: from a generator and [keys, n_kv_heads, head_dim // 32, 34], the blocks."""


def ones(shape: Shape) -> Array:
    """Q8_0 blocks whose every value is exactly 1."""
    blocks = np.ones(shape, np.uint8)
    return _with_scales(blocks, np.ones(shape[:-1]))


def _unseen_random(rng: Rng, shape: Shape) -> Array:
    return rng.integers(0, 256, shape, np.uint8)


def _constant(scale_bits: int) -> Callable[[Rng, Shape], Array]:
    def fill(rng: Rng, shape: Shape) -> Array:
        blocks = np.full(shape, 0x7F, np.uint8)
        blocks[..., 0], blocks[..., 1] = scale_bits & 255, scale_bits >> 8
        return blocks

    return fill


UNSEEN: Mapping[str, Callable[[Rng, Shape], Array]] = {
    "nan": _constant(0x7E00),
    "inf": _constant(0x7C00),
    "random": _unseen_random,
    "large": _constant(0x7BFF),
}
"""What cache bytes hold that no row may see: f16 scales of NaN, infinity, 65504, or any bytes."""


# ---- queries, positions, tree bias ----------------------------------------------------------------------------------


def _q_normal(rng: Rng, shape: Shape) -> Array:
    return rng.standard_normal(shape, np.float32)


def _q_large(rng: Rng, shape: Shape) -> Array:
    q = _q_normal(rng, shape)
    q[::3] *= 12
    return q


def _q_vast(rng: Rng, shape: Shape) -> Array:
    """Each row and head of one sign and one size: with K of one sign, all its scores lie on one side of 1e30."""
    signs = rng.choice(np.array([-1, 1], np.float32), (*shape[:2], 1))
    sizes = (10.0 ** rng.uniform(20, 37, (*shape[:2], 1))).astype(np.float32)
    return np.asarray(np.abs(_q_normal(rng, shape)) * signs * sizes)


def _q_one_hot(rng: Rng, shape: Shape) -> Array:
    q = np.zeros(shape, np.float32)
    np.put_along_axis(q, rng.integers(0, shape[2], (*shape[:2], 1)), np.float32(8), axis=2)
    return q


def _q_alternating(rng: Rng, shape: Shape) -> Array:
    signs: Array = np.where(np.indices(shape).sum(axis=0) % 2, np.float32(1), np.float32(-1))
    return signs


QUERIES: Mapping[str, Callable[[Rng, Shape], Array]] = {
    "normal": _q_normal,
    "zeros": lambda rng, shape: np.zeros(shape, np.float32),
    "large": _q_large,
    "beyond_f16": lambda rng, shape: np.clip(12_000 * _q_normal(rng, shape), -60_000, 60_000),
    "vast": _q_vast,
    "largest": lambda rng, shape: np.clip(3e38 * _q_normal(rng, shape).astype(np.float64), -F32_MAX, F32_MAX),
    "tiny": lambda rng, shape: np.float32(1e-20) * _q_normal(rng, shape),
    "one_hot": _q_one_hot,
    "alternating": _q_alternating,
}
"""Named contents of q. `large`: times 12 in every third row, so that most weights underflow; `beyond_f16`: fits f16
itself, its products with a key do not; `vast` and `largest`: fit f32, their products with codes do not."""


def _chain(rng: Rng, rows: int, ctx: int) -> Array:
    return np.maximum(-1, ctx - rows + np.arange(rows))


POSITIONS: Mapping[str, Callable[[Rng, int, int], Array]] = {
    "chain": _chain,
    "scattered": lambda rng, rows, ctx: rng.permutation(np.append(rng.integers(-1, ctx, rows - 1), ctx - 1)),
    "same": lambda rng, rows, ctx: np.full(rows, ctx - 1),
    "reversed": lambda rng, rows, ctx: _chain(rng, rows, ctx)[::-1],
}
"""Where rows stand, from their number and the context: the furthest one always sees all of it."""


def _b_tree(rng: Rng, rows: int, cols: int) -> Array:
    """A random tree: a finite bias for a row and its ancestors, -inf for the rest."""
    bias = np.full((rows, cols), -np.inf)
    for row in range(rows):
        if row:
            bias[row] = bias[rng.integers(0, row)]
        bias[row, row] = rng.standard_normal()
    return bias


def _b_masked(rng: Rng, rows: int, cols: int) -> Array:
    bias = rng.standard_normal((rows, cols))
    bias[rng.random((rows, cols)) < 0.5] = -np.inf
    bias[rng.random(rows) < 0.5] = -np.inf
    return bias


BIASES: Mapping[str, Callable[[Rng, int, int], Array]] = {
    "tree": _b_tree,
    "dense": lambda rng, rows, cols: 4 * rng.standard_normal((rows, cols)),
    "masked": _b_masked,
}
"""Named tree biases [rows, cols]. `masked`: half of all entries, and all of about every second row, are -inf."""
