"""The seam between the models and the kernels: KV caches, and who attends to them.

The target's full attention and the draft's attention know only the `Attention` protocol. "q8_0" keeps the
target's KV cache in Q8_0 and goes through `hipfire_kernels.dispatch`; "f32" is plain numpy, for parity with
other implementations of the models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InputError
from ..layout import Q8_BLOCK, kv_cache_shape
from ..runtime import Device
from ..runtime import device as open_device
from .layers import BLOCK_ROWS, Array

KV_FORMATS = ("q8_0", "f32")

_PREFILL_ROWS = 128


class KVCache:
    """Keys and values of one layer, one row per position; grows by doubling.

    A row is visible only to queries at its position or later, so rows of rejected tokens need no clearing:
    the next block overwrites them before any query can reach them.

    Attributes:
        k, v: [capacity, *row_shape], arrays of the device, the host by default.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: DTypeLike, device: Device | None = None) -> None:
        self._device = device or open_device("host")
        self.k: Any = self._device.to_device(np.zeros((0, *row_shape), dtype))
        self.v: Any = self._device.to_device(np.zeros((0, *row_shape), dtype))

    def reserve(self, rows: int) -> None:
        """Make room for `rows` positions in all."""
        capacity = self.k.shape[0]
        if rows > capacity:
            longer = max(rows, 2 * capacity, 256)
            self.k, self.v = self._grown(self.k, longer), self._grown(self.v, longer)

    def _grown(self, old: Any, capacity: int) -> Any:
        grown = np.zeros((capacity, *old.shape[1:]), old.dtype)
        grown[: old.shape[0]] = self._device.to_host(old)
        return self._device.to_device(grown)


class Attention(Protocol):
    """Attention of one request. `positions` are int32, consecutive."""

    def cache(self, n_kv_heads: int, head_dim: int) -> KVCache:
        """An empty target KV cache for one layer."""

    def write(self, cache: KVCache, k: Array, v: Array, positions: NDArray[np.int32]) -> None:
        """Store k, v float32 [rows, n_kv_heads, head_dim] at `positions`."""

    def attend(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> Array:
        """Attention of q float32 [rows, n_heads, head_dim]: a row sees the keys up to its own position."""

    def draft(self, q: Array, k: Array, v: Array, *, window: int, causal: bool) -> Array:
        """Attention of a draft block, whose rows are the last positions of the keys.

        q float32 [rows, n_heads, head_dim]; k, v float32 [n, n_kv_heads, head_dim]. A row sees keys less than
        `window` positions away, all with 0; `causal` hides what follows it.
        """


@dataclass(frozen=True)
class Block:
    """What every layer of one forward pass shares.

    Attributes:
        attention: who attends.
        positions: int32 [rows].
        rope_table: cos and sin of the positions.
        record: whether the recurrent layers keep a tape, for a later rollback.
    """

    attention: Attention
    positions: NDArray[np.int32]
    rope_table: tuple[Array, Array]
    record: bool


def make_attention(kv_format: str, device: Device, routes: Counter[str]) -> Attention:
    """The attention for one request; every call adds the route it took to `routes`."""
    return Float32Attention(routes) if kv_format == "f32" else Q8Attention(device, routes)


class Float32Attention:
    """Plain numpy. A row of a verify block is computed alone, so that it does not depend on the others."""

    def __init__(self, routes: Counter[str]) -> None:
        self._routes = routes

    def cache(self, n_kv_heads: int, head_dim: int) -> KVCache:
        return KVCache((n_kv_heads, head_dim), np.float32)

    def write(self, cache: KVCache, k: Array, v: Array, positions: NDArray[np.int32]) -> None:
        cache.reserve(int(positions[-1]) + 1)
        cache.k[positions[0] : positions[-1] + 1] = k
        cache.v[positions[0] : positions[-1] + 1] = v

    def attend(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> Array:
        self._routes["numpy"] += 1
        step = 1 if len(q) <= BLOCK_ROWS else _PREFILL_ROWS
        parts = []
        for begin in range(0, len(q), step):
            at = positions[begin : begin + step]
            bound = int(at[-1]) + 1
            mask = None if step == 1 else np.arange(bound) <= at[:, None]
            parts.append(_attend(q[begin : begin + step], cache.k[:bound], cache.v[:bound], mask))
        return np.concatenate(parts)

    def draft(self, q: Array, k: Array, v: Array, *, window: int, causal: bool) -> Array:
        self._routes["numpy"] += 1
        if not window and not causal:
            return _attend(q, k, v, None)
        ahead = np.arange(len(k)) - np.arange(len(k) - len(q), len(k))[:, None]
        mask = np.ones(ahead.shape, bool)
        if causal:
            mask &= ahead <= 0
        if window:
            mask &= np.abs(ahead) < window
        return _attend(q, k, v, mask)


def _attend(q: Array, k: Array, v: Array, mask: NDArray[np.bool_] | None) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v per head. mask bool [rows, keys]: True where a key is visible."""
    rows, n_heads, head_dim = q.shape
    n_kv = k.shape[1]
    group = n_heads // n_kv
    grouped = q.reshape(rows, n_kv, group, head_dim).transpose(1, 0, 2, 3)
    grouped = grouped.reshape(n_kv, rows * group, head_dim) * np.float32(head_dim**-0.5)
    scores = _product(grouped, k.transpose(1, 2, 0))
    if mask is not None:
        scores += np.repeat(np.where(mask, np.float32(0.0), np.float32(-np.inf)), group, axis=0)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = _product(scores, v.transpose(1, 0, 2))
    out /= scores.sum(axis=-1, keepdims=True)
    out = out.reshape(n_kv, rows, group, head_dim).transpose(1, 0, 2, 3)
    joined: Array = out.reshape(rows, n_heads, head_dim)
    return joined


def _product(a: Array, b: Array) -> Array:
    """a [n, rows, x] @ b [n, x, y]; few rows go one by one, for the reasons of `project_rows`."""
    few = a.shape[1] <= 8 * BLOCK_ROWS
    out: Array = np.matmul(a[:, :, None], b[:, None])[:, :, 0] if few else a @ b
    return out


class Q8Attention:
    """The kernels of this library, on Q8_0 KV caches uint8 [capacity, n_kv_heads, head_dim // 32, 34].

    The caches live on the device; queries, keys, values and outputs travel, since the rest of the model is numpy.
    """

    def __init__(self, device: Device, routes: Counter[str]) -> None:
        self._device = device
        self._routes = routes

    def _count(self, decision: Any) -> None:
        self._routes[decision.route] += 1

    def cache(self, n_kv_heads: int, head_dim: int) -> KVCache:
        if head_dim % Q8_BLOCK:
            raise InputError(
                f"kv_format 'q8_0' needs a head_dim that is a multiple of {Q8_BLOCK}, "
                f"the target has {head_dim}; use kv_format='f32'"
            )
        return KVCache(kv_cache_shape(0, n_kv_heads, head_dim)[1:], np.uint8, self._device)

    def write(self, cache: KVCache, k: Array, v: Array, positions: NDArray[np.int32]) -> None:
        from ..dispatch import kv_write

        cache.reserve(int(positions[-1]) + 1)
        on = self._device
        kv_write(on.to_device(k), on.to_device(v), cache.k, cache.v, positions, device=on)

    def attend(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> Array:
        from ..dispatch import attend

        on = self._device
        out = attend(on.to_device(q), cache.k, cache.v, positions, device=on, on_decision=self._count)
        return on.to_host(out)

    def draft(self, q: Array, k: Array, v: Array, *, window: int, causal: bool) -> Array:
        from ..dispatch import draft_attend

        on = self._device
        query, keys, values = (on.to_device(np.ascontiguousarray(x)) for x in (q, k, v))
        out = draft_attend(query, keys, values, window=window, causal=causal, device=on, on_decision=self._count)
        return on.to_host(out)
