"""One attention call as tensors, and how a case becomes one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.checking import spoil
from hipfire_kernels.checking.numbers import F32_MAX
from hipfire_kernels.layout import kv_cache_shape
from hipfire_kernels.q8_0 import dequantize_q8_0
from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.contents import BIASES, CACHES, LARGEST_Q8, POSITIONS, QUERIES, UNSEEN, Rng, ones

Array = npt.NDArray[Any]

F16_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class Request:
    """One verify-attention call, on the host. An engine's adapter gets this and returns the output.

    Attributes:
        q: float32 [rows, n_heads, head_dim].
        k_cache, v_cache: uint8 [capacity, n_kv_heads, head_dim // 32, 34].
        positions: int32 [rows]; row r sees keys 0 .. positions[r], none for -1.
        tree_bias: float32 [rows, block_cols], or None. With one, every row sees keys 0 .. positions[0] + block_cols - 1
            and the bias is added to the scores of the last block_cols of them.
        window: keys a row sees at most; 0 for all.
        scale: of the scores; None for 1 / sqrt(head_dim).
    """

    q: Array
    k_cache: Array
    v_cache: Array
    positions: Array
    tree_bias: Array | None = None
    window: int = 0
    scale: float | None = None

    @property
    def ctx(self) -> int:
        """Keys the furthest row sees."""
        if self.tree_bias is not None:
            return int(self.positions[0]) + int(self.tree_bias.shape[1])
        return int(self.positions.max()) + 1

    @property
    def factor(self) -> float:
        """The scale of the scores, as a number."""
        return 1 / math.sqrt(self.q.shape[2]) if self.scale is None else self.scale

    def visible(self) -> Array:
        """bool [rows, ctx]: which keys a row sees. One that the tree bias hides is not seen."""
        key = np.arange(self.ctx)
        bounds = self.positions.astype(np.int64)[:, None] + 1
        if self.tree_bias is not None:
            seen = np.ones((len(self.positions), self.ctx), bool)
            seen[:, int(self.positions[0]) :] = ~np.isneginf(self.tree_bias)
            return seen
        seen = key < bounds
        return seen & (key >= bounds - self.window) if self.window else seen

    def take(self, rows: slice) -> Request:
        """The same call for some of its rows."""
        if self.tree_bias is not None:
            at = np.full_like(self.positions[rows], self.positions[0])
            return dataclasses.replace(self, q=self.q[rows], positions=at, tree_bias=self.tree_bias[rows])
        return dataclasses.replace(self, q=self.q[rows], positions=self.positions[rows])

    def reordered(self, kv_heads: Array, heads: Array) -> Request:
        """The same call with its KV heads and its query heads in another order."""
        k, v = (np.ascontiguousarray(cache[:, kv_heads]) for cache in (self.k_cache, self.v_cache))
        return dataclasses.replace(self, q=np.ascontiguousarray(self.q[:, heads]), k_cache=k, v_cache=v)

    def of_ones(self) -> Request:
        """The same call with V of ones where a row sees it."""
        seen = np.flatnonzero(self.visible().any(axis=0))
        v_cache = self.v_cache.copy()
        v_cache[seen] = ones((len(seen), *v_cache.shape[1:]))
        return dataclasses.replace(self, v_cache=v_cache)

    def even(self) -> Request:
        """The same call with equal scores for all keys a row sees."""
        bias = self.tree_bias
        flat = bias if bias is None else np.where(np.isneginf(bias), bias, np.float32(0))
        return dataclasses.replace(self, q=np.zeros_like(self.q), tree_bias=flat)


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One draft-attention call: q float32 [rows, n_heads, head_dim], k and v [keys, n_kv_heads, head_dim], also f16.

    Row r stands at position keys - rows + r. `window` 0 is none.
    """

    q: Array
    k: Array
    v: Array
    window: int = 0
    causal: bool = False
    scale: float | None = None

    @property
    def factor(self) -> float:
        """The scale of the scores, as a number."""
        return 1 / math.sqrt(self.q.shape[2]) if self.scale is None else self.scale

    def visible(self) -> Array:
        """bool [rows, keys]: which keys a row sees."""
        rows, keys = len(self.q), len(self.k)
        ahead = (keys - rows + np.arange(rows))[:, None] - np.arange(keys)
        seen = ahead >= 0 if self.causal else np.ones((rows, keys), bool)
        return seen & (abs(ahead) < self.window) if self.window else seen

    def take(self, rows: slice) -> DraftRequest:
        """The same call for some of its rows; not for a window or a causal mask, where a row's place matters."""
        return dataclasses.replace(self, q=self.q[rows])

    def reordered(self, kv_heads: Array, heads: Array) -> DraftRequest:
        """See `Request.reordered`."""
        k, v = (np.ascontiguousarray(x[:, kv_heads]) for x in (self.k, self.v))
        return dataclasses.replace(self, q=np.ascontiguousarray(self.q[:, heads]), k=k, v=v)

    def of_ones(self) -> DraftRequest:
        """See `Request.of_ones`."""
        v = self.v.copy()
        v[self.visible().any(axis=0)] = 1
        return dataclasses.replace(self, v=v)

    def even(self) -> DraftRequest:
        """See `Request.even`."""
        return dataclasses.replace(self, q=np.zeros_like(self.q))


AnyRequest = Request | DraftRequest


def _caches(case: FuzzCase, seen: Array, rng: Rng) -> tuple[Array, Array]:
    """K and V with the case's contents where `seen`, and its unseen bytes elsewhere."""
    made = []
    for contents in (case.keys, case.values):
        shape = kv_cache_shape(len(seen) + case.slack, case.n_kv_heads, case.head_dim)
        cache = UNSEEN[case.unseen](rng, shape)
        count = int(seen.sum())
        if count:
            cache[: len(seen)][seen] = CACHES[contents](rng, (count, *shape[1:]))
        made.append(cache)
    return made[0], made[1]


def verify_request(case: FuzzCase, *, tree: bool) -> Request:
    """The tensors of a verify-attention case."""
    rng = np.random.default_rng(case.seed)
    q = np.asarray(QUERIES[case.queries](rng, (case.rows, case.n_heads, case.head_dim)), np.float32)
    bias = None
    if tree:
        bias = BIASES[case.bias](rng, case.rows, case.rows + case.extra_cols).astype(np.float32)
        at = case.ctx + np.arange(case.rows)
    else:
        at = POSITIONS[case.positions](rng, case.rows, case.ctx)
    bare = Request(q, np.empty(0), np.empty(0), np.ascontiguousarray(at, np.int32), bias, case.window, case.scale)
    k_cache, v_cache = _caches(case, np.asarray(bare.visible().any(axis=0)), rng)
    made = dataclasses.replace(bare, k_cache=k_cache, v_cache=v_cache)
    _spoil(case, {"q": q, "k": k_cache, "v": v_cache, "bias": bias}, made.visible())
    return made


def _spoil(case: FuzzCase, arrays: dict[str, Array | None], visible: Array) -> None:
    """Put what `case.spoilt` says into one to three places of an array that rows read."""
    if not case.spoilt:
        return
    rng = np.random.default_rng([case.seed, 2])
    where, kind = case.spoilt.split()
    array = arrays[where]
    assert array is not None
    for _ in range(int(rng.integers(1, 4))):
        if where == "q":
            spoil.element(rng, array, kind)
        elif where == "bias":
            spoil.column(rng, array, kind)
        else:
            spoil.head(rng, array, spoil.read_key(rng, visible), int(rng.integers(0, case.n_kv_heads)), kind)


def draft_request(case: FuzzCase, *, f16: bool) -> DraftRequest:
    """The tensors of a draft-attention case: `ctx` keys of context, then a block of as many keys as rows.

    K and V are what Q8_0 contents decode to; as f16, what f16 can hold of that, as f32 `largest` to the end of f32.
    """
    rng = np.random.default_rng(case.seed)
    q = np.asarray(QUERIES[case.queries](rng, (case.rows, case.n_heads, case.head_dim)), np.float32)
    keys = case.ctx + case.rows
    bare = DraftRequest(q, np.empty((keys, 0)), np.empty(0), case.window, case.causal, case.scale)
    seen = np.asarray(bare.visible().any(axis=0))
    caches = _caches(dataclasses.replace(case, slack=0), seen, rng)
    k: Array
    v: Array
    with np.errstate(invalid="ignore"):
        k, v = (dequantize_q8_0(cache) for cache in caches)
    if f16:
        k, v = (np.clip(x, -F16_MAX, F16_MAX).astype(np.float16) for x in (k, v))
    else:
        for x, contents in ((k, case.keys), (v, case.values)):
            if contents == "largest":
                x[seen] = np.clip(x[seen] * np.float64(F32_MAX / LARGEST_Q8), -F32_MAX, F32_MAX)
    _spoil(case, {"q": q, "k": k, "v": v}, bare.visible())
    return dataclasses.replace(bare, k=k, v=v)
