"""Numbers that are none, and the largest there are, put where a row reads them. Everything is changed in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rng = np.random.Generator

KINDS = ("nan", "inf")
"""What is put: NaN, or an infinity of either sign."""

_SCALES = {"nan": (0x7E00, 0xFE00, 0x7C01), "inf": (0x7C00, 0xFC00)}
"""Bits of f16; the last NaN is a signalling one."""


def value(rng: Rng, kind: str) -> float:
    """A NaN, or an infinity of either sign."""
    return float("nan") if kind == "nan" else float(rng.choice([np.inf, -np.inf]))


def element(rng: Rng, array: Array, kind: str) -> None:
    """One element of an array, any of them."""
    array[tuple(int(rng.integers(0, n)) for n in array.shape)] = value(rng, kind)


def column(rng: Rng, bias: Array, kind: str) -> None:
    """One entry of a tree bias. An infinite one is positive: -inf hides a key."""
    bias[tuple(int(rng.integers(0, n)) for n in bias.shape)] = np.nan if kind == "nan" else np.inf


def read_key(rng: Rng, visible: Array) -> int | None:
    """A key that some row sees, every other time one that others do not; None where no row sees any.

    Args:
        visible: bool [rows, keys].
    """
    seen = np.flatnonzero(visible.any(axis=0))
    ragged = np.flatnonzero(visible.any(axis=0) & ~visible.all(axis=0))
    among = ragged if len(ragged) and rng.random() < 0.5 else seen
    return int(rng.choice(among)) if len(among) else None


def head(rng: Rng, array: Array, key: int | None, kv_head: int, kind: str) -> None:
    """One Q8_0 block's scale of a cache [keys, n_kv_heads, head_dim // 32, 34], or one dim of [keys, n_kv_heads,
    head_dim], of one head of one key."""
    if key is None:
        return
    at = int(rng.integers(0, array.shape[2]))
    if array.ndim == 3:
        array[key, kv_head, at] = value(rng, kind)
        return
    bits = int(rng.choice(_SCALES[kind]))
    array[key, kv_head, at, :2] = bits & 255, bits >> 8


def call(rng: Rng, q: Array, k: Array, v: Array, visible: Array, bias: Array | None) -> None:
    """All of it at once, and yet rows of all sorts are left.

    NaN and an infinity in q; of every second KV head K, at the key that fewest rows see, of the others V; NaN or an
    infinity in the bias. Every third row of q is large: of normal K its scores reach to 60 on either side of 0, so
    that the smallest weights are too small for float32. A score of 64 and more is itself off by up to 4e-6 when it is
    rounded to float32, its weight by as much, and the sum that it comes from by more: larger ones would measure that
    and no kernel.
    """
    q[::3] *= 16
    for kind in KINDS:
        element(rng, q, kind)
    readers = visible.sum(axis=0)
    seen = np.flatnonzero(readers)
    rare = int(seen[np.argmin(readers[seen])]) if len(seen) else None
    first = int(rng.integers(0, 2))
    for kv_head in range(k.shape[1]):
        kind = str(rng.choice(KINDS))
        if (kv_head + first) % 2:
            head(rng, k, rare, kv_head, kind)
        else:
            head(rng, v, read_key(rng, visible), kv_head, kind)
    if bias is not None:
        column(rng, bias, str(rng.choice(KINDS)))
