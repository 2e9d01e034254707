"""The seam between the models and the kernels: KV caches, and who attends to them.

The target's full attention and the draft's attention know only the `Attention` protocol. "q8_0" keeps the
target's KV cache in Q8_0 and goes through `hipfire_kernels.dispatch`; "f32" is plain numpy, for parity with
other implementations of the models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hipfire_kernels.errors import InputError, NumericsError
from hipfire_kernels.layout import Q8_BLOCK, kv_cache_shape
from hipfire_kernels.model.layers import BLOCK_ROWS, Array, first_broken_row
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.protocol import Device

if TYPE_CHECKING:
    from hipfire_kernels.dispatch import AttendRequest, Decision, Plan

KV_FORMATS = ("q8_0", "f32")

WEIGHTS = "f32"
"""Format of the targets' weights: they are widened when they are loaded."""

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
    """Attention of one conversation. `positions` are int32, consecutive."""

    def count_in(self, counts: AttentionCounts) -> None:
        """Count the following calls, those of a request, in `counts`."""

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


@dataclass
class AttentionCounts:
    """How the attention calls of one request went.

    Attributes:
        routes: route name -> calls that took it.
        refused: "route: check" -> decisions in which that check kept the route from running.
        graph: of verify blocks on a device: calls by mode (direct, warmup, capture, replay) and failed captures.
    """

    routes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    graph: Counter[str] = field(default_factory=Counter)

    def note(self, decision: Decision) -> None:
        """Count what a decision refused."""
        from hipfire_kernels.dispatch.counters import refusals

        self.refused.update(refusals(decision))


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


def make_attention(kv_format: str, device: Device) -> Attention:
    """The attention for one conversation."""
    return Float32Attention(Counter()) if kv_format == "f32" else Q8Attention(device)


class Float32Attention:
    """Plain numpy. A row of a verify block is computed alone, so that it does not depend on the others."""

    def __init__(self, routes: Counter[str]) -> None:
        self._routes = routes

    def count_in(self, counts: AttentionCounts) -> None:
        self._routes = counts.routes

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

    The caches live on the device; queries, keys, values and outputs travel, since the rest of the model is numpy. On a
    device with graphs, and where the policy wants it, the attention of a verify block is captured per layer and
    replayed; longer ones, of a prefill, run directly, and so do those for which a faster route is admitted that no
    graph can hold.
    """

    def __init__(self, device: Device) -> None:
        from hipfire_kernels.dispatch import VerifyGraph

        self._device = device
        self._graph = VerifyGraph(device, WEIGHTS)
        self._block: _FixedBlock | None = None
        self.count_in(AttentionCounts())

    def count_in(self, counts: AttentionCounts) -> None:
        self._counts = counts
        self._graph.counts = counts.graph

    def _count(self, decision: Decision) -> None:
        self._counts.note(decision)
        self._counts.routes[str(decision.route)] += 1

    def cache(self, n_kv_heads: int, head_dim: int) -> KVCache:
        if head_dim % Q8_BLOCK:
            raise InputError(
                f"kv_format 'q8_0' needs a head_dim that is a multiple of {Q8_BLOCK}, "
                f"the target has {head_dim}; use kv_format='f32'"
            )
        return KVCache(kv_cache_shape(0, n_kv_heads, head_dim)[1:], np.uint8, self._device)

    def write(self, cache: KVCache, k: Array, v: Array, positions: NDArray[np.int32]) -> None:
        from hipfire_kernels.dispatch import kv_write

        for name, rows in (("keys", k), ("values", v)):
            if (at := first_broken_row(rows)) is not None:
                raise NumericsError(
                    f"the {name} of position {positions[at]} hold NaN or infinity, for which Q8_0 has no code; "
                    "look for the weights or activations that overflow: kv_format='f32' runs on to the logits"
                )
        cache.reserve(int(positions[-1]) + 1)
        on = self._device
        kv_write(on.to_device(k), on.to_device(v), cache.k, cache.v, positions, device=on)

    def attend(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> Array:
        on = self._device
        if len(q) > BLOCK_ROWS:
            return on.to_host(self._directly(cache, q, positions)[0])
        if self._graph.active and self._is_faster_directly(cache, q, positions):
            self._graph.counts["direct"] += 1
            return on.to_host(self._directly(cache, q, positions)[0])
        block = self._filled_block(cache, q, positions) if self._graph.active else None
        out = block.out if block else None

        def step(stream: Any) -> str:
            nonlocal out
            if block is not None and stream is not None:
                return block.launch(cache, stream)
            out, route = self._directly(cache, q, positions)
            return route

        route = self._graph.run(cache, block.key(cache) if block else None, step)
        if self._graph.mode != "direct":  # direct calls count themselves
            self._counts.routes[route] += 1
        return on.to_host(out)

    def _is_faster_directly(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> bool:
        """Whether the route that would run is one that a graph cannot hold, and the graph is not insisted on.

        What a graph saves is a few launches; such a route has evidence of being faster by more than that.
        """
        from hipfire_kernels.dispatch import admit, policy
        from hipfire_kernels.dispatch.routes import is_graph_safe

        if policy.current().verify_graph:
            return False
        request = _verify_request(self._device, cache, q, int(positions[-1]) + 1, capturing=False)
        chosen = admit(request).route
        return chosen is not None and not is_graph_safe(chosen)

    def _directly(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> tuple[Any, str]:
        from hipfire_kernels.dispatch import attend

        routes: list[str] = []

        def decided(decision: Decision) -> None:
            self._count(decision)
            routes.append(str(decision.route))

        on = self._device
        out = attend(on.to_device(q), cache.k, cache.v, positions, device=on, on_decision=decided)
        return out, routes[0]

    def _filled_block(self, cache: KVCache, q: Array, positions: NDArray[np.int32]) -> _FixedBlock:
        """The arrays that a captured attention reads, with this block's values. A new shape or capacity: new ones."""
        if self._block is None or not self._block.fits(cache, q):
            self._block = _FixedBlock(self._device, cache, q)
            self._counts.note(self._block.plan.decision)
        self._block.fill(q, positions)
        return self._block

    def draft(self, q: Array, k: Array, v: Array, *, window: int, causal: bool) -> Array:
        from hipfire_kernels.dispatch import draft_attend

        on = self._device
        query, keys, values = (on.to_device(np.ascontiguousarray(x)) for x in (q, k, v))
        out = draft_attend(query, keys, values, window=window, causal=causal, device=on, on_decision=self._count)
        return on.to_host(out)


def _verify_request(device: Device, cache: KVCache, q: Array, ctx: int, *, capturing: bool) -> AttendRequest:
    """A block of consecutive rows against a cache."""
    from hipfire_kernels.dispatch import AttendRequest

    return AttendRequest(
        arch=device.arch.name,
        kv_format="q8_0",
        head_dim=q.shape[2],
        n_heads=q.shape[1],
        n_kv_heads=cache.k.shape[1],
        rows=len(q),
        logical_ctx=ctx,
        layout="chain",
        capturing=capturing,
        recording=False,
    )


class _FixedBlock:
    """Device arrays and a plan for verify blocks of one shape, at one capacity of the caches; for all layers.

    A captured launch knows addresses, so what changes from block to block is written into the same arrays. One plan,
    and so one workspace, serves all layers: they run one behind the other.
    """

    def __init__(self, device: Device, cache: KVCache, q: Array) -> None:
        from hipfire_kernels.dispatch import plan

        self._device: Any = device  # one with graphs, which can be written to
        self.q = device.empty(q.shape, np.float32)
        self.positions = device.empty(q.shape[:1], np.int32)
        self.out = device.empty(q.shape, np.float32)
        self._capacity = cache.k.shape[0]
        self.plan: Plan = plan(_verify_request(device, cache, q, self._capacity, capturing=True), device)

    def fits(self, cache: KVCache, q: Array) -> bool:
        """Whether a block of this shape, on this cache, can use the arrays."""
        return bool(self.q.shape == q.shape and self._capacity == cache.k.shape[0])

    def fill(self, q: Array, positions: NDArray[np.int32]) -> None:
        """Bring a block's values to the device."""
        self._device.write(self.q, np.ascontiguousarray(q))
        self._device.write(self.positions, positions)

    def key(self, cache: KVCache) -> Hashable:
        """What a graph of `launch` depends on."""
        from hipfire_kernels.dispatch import graph_key

        arrays = {"q": self.q, "k": cache.k, "v": cache.v, "positions": self.positions, "out": self.out}
        return graph_key(self._device, **arrays)

    def launch(self, cache: KVCache, stream: Any) -> str:
        """Attend on a stream; the route that ran."""
        return self.plan.run(self.q, cache.k, cache.v, self.positions, self.out, stream=stream)
