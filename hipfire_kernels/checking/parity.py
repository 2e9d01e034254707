"""Hold a kernel against the float64 oracle on one case: poisoned, guarded, worst row.

A `Case` is seeds and numbers, no tensors, so it can be printed, stored and replayed. `check` runs a variant on it:
before the launch outputs are NaN and scratch is stale, both stand between guard regions, and cache bytes that no row
may see hold NaN scales; inputs must come out unchanged. The error of a (row, head) is max|diff| / max|reference|; a
case is as good as its worst. What has no exact value must come out as no number (`numbers`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import reference, spoil
from hipfire_kernels.checking.numbers import F32_MAX, excused, largest_of, misfit, reach, worst_row
from hipfire_kernels.checking.result import Checked, named
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import Q8_BLOCK, Q8_MAX, TILE, kv_cache_shape, partials_shape, tiles
from hipfire_kernels.q8_0 import quantize_q8_0
from hipfire_kernels.running.attention import PARTIALS_ROWS, check_verify, verify_plan, workspace_shape
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.draft import DraftWorkspace, draft_attend_rows

Array = npt.NDArray[Any]

VALUES = {
    "normal": "standard normal, quantised",
    "large": "queries times 12 in every third row, so that most weights underflow",
    "foreign": "raw bytes of another writer: codes -128, scales 0, -0, negative, subnormal",
    "zeros": "all-zero K and V blocks",
    "spoilt": "NaN and infinities in q, K, V and the tree bias, where rows read them",
    "extreme": "K, and each row of q, of one sign, every other row to 3e38: scores below -1e30, products that overflow",
}
"""Named contents of a case."""

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 32)
CONTEXTS = (1, 2, 127, 128, 129, 255, 2048, 4097)
GROUPS = (1, 4, 6)

GUARD = 4096
"""Elements on each side of a written array that a launch must leave alone."""

UNSEEN = 37
"""Cache positions behind the last visible key, all poisoned."""


@dataclass(frozen=True)
class Case:
    """One input. `ctx` is the number of keys the last row sees; the rows are a chain, row r sees ctx - rows + r + 1.

    Rows of a chain longer than its context see no key, and must come out zero.
    """

    rows: int
    ctx: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    values: str = "normal"
    window: int = 0
    block_cols: int = 0
    seed: int = 0

    def describe(self) -> str:
        """Short and complete; the id of a test."""
        extra = (f"-w{self.window}" if self.window else "") + (f"-tree{self.block_cols}" if self.block_cols else "")
        return (
            f"B{self.rows}-ctx{self.ctx}-h{self.n_heads}/{self.n_kv_heads}-d{self.head_dim}"
            f"-{self.values}{extra}-seed{self.seed}"
        )


@dataclass(frozen=True)
class Result(Checked):
    """What one check of a variant found."""

    variant: Variant
    case: Case
    error: float
    limit: float
    fault: str = ""

    def describe(self) -> str:
        """One line; for a failure with what it takes to run it again."""
        return self.line(named(self.variant.name, self.case))


def grid(variant: Variant, *, rows: Sequence[int] = ROWS, contexts: Sequence[int] = CONTEXTS) -> Iterator[Case]:
    """The cases a variant is held against: rows x contexts x query heads per KV head, two KV heads, normal values;
    then every other named content once per group at a context of three tiles; a sliding variant also with no window."""
    params = dict(variant.params)
    head_dim = params.get("head_dim", 128)
    for group in (params["group"],) if "group" in params else GROUPS:
        shapes = [(b, ctx, "normal") for b in rows for ctx in contexts]
        shapes += [(9, 2 * TILE + 65, name) for name in VALUES if name != "normal"]
        for b, ctx, values in shapes:
            yield Case(
                b,
                ctx,
                2 * group,
                2,
                head_dim,
                values,
                window=_window(params, ctx),
                block_cols=b if "tree" in (params.get("mask"), params.get("bound")) else 0,
                seed=b * 7919 + ctx * 31 + group,
            )
        if params.get("sliding"):
            yield Case(9, 2 * TILE + 65, 2 * group, 2, head_dim, seed=group)  # its causal mask alone, or nothing


def _window(params: dict[str, Any], ctx: int) -> int:
    """A window that cuts inside a tile where the context allows: 5/8 of it."""
    return max(1, ctx * 5 // 8) if params.get("mask") == "window" or params.get("sliding") else 0


# ---- contents of a case ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensors of a verify-attention case, on the host."""

    q: Array
    k_cache: Array
    v_cache: Array
    positions: Array
    tree_bias: Array | None


@functools.lru_cache(maxsize=12)
def inputs(case: Case) -> Inputs:
    """The tensors of a case. Cache positions that no row sees hold NaN scales and codes 0x7f."""
    rng = np.random.default_rng(case.seed)
    q = rng.standard_normal((case.rows, case.n_heads, case.head_dim), np.float32)
    if case.values == "large":
        q[::3] *= 12
    start = case.ctx - case.rows
    if case.block_cols:
        start = max(0, start)
    positions = np.maximum(-1, start + np.arange(case.rows)).astype(np.int32)
    visible = start + case.block_cols if case.block_cols else case.ctx
    k_cache, v_cache = (_cache(case, visible, rng) for _ in range(2))
    found = Inputs(q, k_cache, v_cache, positions, _tree_bias(case, rng))
    if case.values == "spoilt":
        spoil.call(rng, q, k_cache, v_cache, visible_keys(case, found), found.tree_bias)
    if case.values == "extreme":
        _make_extreme(rng, q)
        codes = k_cache[:visible, ..., 2:].view(np.int8)
        codes[...] = np.maximum(1, np.abs(codes))
    return found


def visible_keys(case: Case, i: Inputs) -> Array:
    """bool [rows, keys]: which keys of the cache a row sees."""
    seen: Array
    key, bounds = np.arange(len(i.k_cache)), i.positions.astype(np.int64)[:, None] + 1
    if i.tree_bias is not None:
        start = int(i.positions[0])
        seen = np.broadcast_to(key < start + case.block_cols, (case.rows, len(key))).copy()
        seen[:, start : start + case.block_cols] &= ~np.isneginf(i.tree_bias)
        return seen
    seen = key < bounds
    return seen if not case.window else seen & (key >= bounds - case.window)


def _make_extreme(rng: np.random.Generator, q: Array) -> None:
    """Every other row large, each of one sign: with K of one sign all its scores are far on one side of 0. Those of the
    first row are too far below for f32; the third row's products with K add up to more than f32 holds, its scores do
    not."""
    sizes = 10.0 ** rng.uniform(28, 36.5, (len(q), 1, 1))
    sizes[1::2], sizes[0], sizes[2:3] = 1, 10**38.5, 10**36.9
    signs = rng.choice([-1, 1], (len(q), 1, 1))
    signs[0] = -1
    q[...] = np.minimum(np.abs(q) * sizes, F32_MAX) * signs


def _cache(case: Case, visible: int, rng: np.random.Generator) -> Array:
    cache = np.full(kv_cache_shape(visible + UNSEEN, case.n_kv_heads, case.head_dim), 0x7F, np.uint8)
    cache[..., 1] = 0x7E  # with 0x7f below it: an f16 NaN
    seen = cache[:visible]
    if case.values == "zeros":
        seen[...] = 0
    elif case.values == "foreign":
        seen[...] = _foreign_blocks(seen.shape, rng)
    else:
        seen[...] = quantize_q8_0(rng.standard_normal((visible, case.n_kv_heads, case.head_dim), np.float32))
    return cache


def _foreign_blocks(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Blocks a writer of our own never makes: extreme codes, and scales of every class but NaN and infinity."""
    blocks = np.empty(shape, np.uint8)
    blocks[..., 2:] = rng.choice(np.array([0x80, 0x81, 0x00, 0x7F, 0x01, 0xFF], np.uint8), (*shape[:-1], Q8_BLOCK))
    scales = np.array([0.0, -0.0, 6e-8, -3e-5, 0.01, -0.02, 0.013, 0.007], np.float16)
    blocks[..., :2] = rng.choice(scales, shape[:-1])[..., None].view(np.uint8)
    return blocks


def _tree_bias(case: Case, rng: np.random.Generator) -> Array | None:
    """A random tree over the block: a finite bias for a row and its ancestors, -inf for the rest."""
    if not case.block_cols:
        return None
    bias = np.full((case.rows, case.block_cols), -np.inf, np.float32)
    for row in range(case.rows):
        if row:
            bias[row] = bias[rng.integers(0, row)]
        bias[row, row] = rng.standard_normal()
    return bias


@functools.lru_cache(maxsize=8)
def expected(case: Case) -> Array:
    """What the oracle gives for a case of verify attention, float64 [rows, n_heads, head_dim]."""
    i = inputs(case)
    return reference.attend(i.q, i.k_cache, i.v_cache, i.positions, None, i.tree_bias, case.window)


def excused_rows(variant: Variant, case: Case) -> Array:
    """bool [rows, n_heads]: which rows of a case of verify attention need not be finite; see `numbers`."""
    i = inputs(case)
    visible, bias = visible_keys(case, i), None
    if i.tree_bias is not None:
        bias = np.zeros(visible.shape)
        bias[:, int(i.positions[0]) :][:, : case.block_cols] = i.tree_bias
    keys = reference.decode_cache(i.k_cache), reach(i.k_cache)
    return excused(i.q, keys, reach(i.v_cache), visible, case.head_dim**-0.5, bias, largest_of(variant))


# ---- poison and guards ----------------------------------------------------------------------------------------------


STALE = 1e3
"""What scratch holds before a launch: as a record it would outweigh every other, where NaN might be skipped."""


class Guarded:
    """An array on a device between two guard regions, its inside filled with a poison (NaN, or bytes 0xff)."""

    def __init__(
        self, device: Device, shape: Sequence[int], dtype: npt.DTypeLike = np.float32, fill: float | None = None
    ) -> None:
        size = math.prod(shape)
        host = np.full((size + 2 * GUARD) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)
        host[GUARD : GUARD + size].view(np.uint8)[...] = 0xFF
        if fill is not None:
            host[GUARD : GUARD + size] = fill
        self._device, self._size = device, size
        self._flat = device.to_device(host)
        self._guard = host[:GUARD].copy().view(np.uint8)
        self.array = device.section(self._flat, GUARD, shape)

    def read(self) -> Array:
        """The inside, on the host."""
        return self._device.to_host(self.array)

    def intact(self) -> bool:
        """Whether both guard regions are as they were."""
        flat = self._device.to_host(self._flat)
        sides = (flat[:GUARD], flat[GUARD + self._size :])
        return all(np.array_equal(np.ascontiguousarray(side).view(np.uint8), self._guard) for side in sides)


def _with_tail(device: Device, rows: Array, tail: float) -> Any:
    """The rows on the device, followed in memory by rows that nobody may use."""
    flat = np.full(rows.size + 32 * max(1, rows[0].size), tail, rows.dtype)
    flat[: rows.size] = rows.ravel()
    return device.section(device.to_device(flat), 0, rows.shape)


def compare(
    variant: Variant,
    case: Case,
    got: Array,
    want: Array,
    guarded: Sequence[Guarded],
    *,
    changed: bool = False,
    excused: Array | None = None,
) -> Result:
    """An output held against the oracle's, and what else may be wrong: a value of the wrong kind (an element that was
    not written is NaN), a written guard, a changed input."""
    fault = misfit(got, want, excused)
    if not all(g.intact() for g in guarded):
        fault = "wrote outside an array"
    if changed:
        fault = "changed an input"
    return Result(variant, case, worst_row(got, want, excused), variant.tolerance.worst_row, fault)


# ---- one check per oracle -------------------------------------------------------------------------------------------


def run_attend(variant: Variant, case: Case, device: Device, rows: slice = slice(None)) -> tuple[Array, list[Guarded]]:
    """Run an attention variant with its reducer on a case, or a slice of its rows: output and guarded arrays."""
    i = inputs(case)
    q, positions = i.q[rows], i.positions[rows]
    ctx = case.ctx if i.tree_bias is None else int(i.positions[0]) + case.block_cols
    out = Guarded(device, q.shape)
    arrays = [
        _with_tail(device, q, np.nan),
        device.to_device(i.k_cache),
        device.to_device(i.v_cache),
        _with_tail(device, positions, 0x3FFFFFFF),
        out.array,
    ]
    shape = check_verify(device, *arrays[:3])
    partials = Guarded(device, workspace_shape(variant, device.multiprocessors, shape, ctx), fill=STALE)
    plan = verify_plan(
        variant, device, shape, ctx, block_cols=case.block_cols, partials_rows=PARTIALS_ROWS, partials=partials.array
    )
    bias = None if i.tree_bias is None else device.to_device(i.tree_bias)
    plan.run(*arrays, ctx=ctx, tree_bias=bias, window=case.window)
    return out.read(), [out, partials]


def _digest(case: Case) -> int:
    i = inputs(case)
    return hash((i.q.tobytes(), i.k_cache.tobytes(), i.v_cache.tobytes(), i.positions.tobytes()))


def check_attend(variant: Variant, case: Case, device: Device) -> Result:
    """Run an attention variant with its reducer and compare with the oracle."""
    if case.head_dim != variant.head_dim:
        raise InputError(f"the case has head_dim {case.head_dim}, {variant.name} has {variant.head_dim}")
    before = _digest(case)
    got, guarded = run_attend(variant, case, device)
    changed = _digest(case) != before
    return compare(variant, case, got, expected(case), guarded, changed=changed, excused=excused_rows(variant, case))


def check_merge(variant: Variant, case: Case, device: Device) -> Result:
    """Random records; those behind a row's bound, and those with no key, hold NaN. Spoilt ones have a key, and NaN."""
    i = inputs(case)
    rng = np.random.default_rng(case.seed)
    bounds = i.positions.astype(np.int64) + 1
    if case.block_cols:
        bounds[:] = int(i.positions[0]) + case.block_cols
    n_tiles = -(-bounds // TILE)
    shape = partials_shape(case.rows, case.n_heads, tiles(case.ctx + case.block_cols), case.head_dim)
    partials = rng.standard_normal(shape, np.float32)
    partials[..., 0] *= 20
    partials[..., 1] = rng.uniform(0.5, 100, shape[:3])
    skipped = rng.random(shape[:3]) < 0.2
    if case.values == "extreme":
        partials[..., 0] = rng.choice([-1, 1], (case.rows, 1, 1)) * rng.uniform(1e30, 1e38, shape[:3])
    partials[skipped] = np.nan
    partials[skipped, 1] = 0
    if case.values == "spoilt":
        _spoil_records(rng, partials)
    if variant.bound == "splits":
        n_tiles[...] = shape[2]
    for row, live in enumerate(n_tiles):
        partials[row, :, live:] = np.nan
    out = Guarded(device, i.q.shape)
    covered = {
        "causal": {"live_tiles": partials.shape[2]},
        "tree": {"live_tiles": partials.shape[2], "block_cols": case.block_cols},
        "splits": {"ctx": case.ctx},
    }[variant.bound]
    launch(
        variant,
        device,
        partials=device.to_device(partials),
        positions=device.to_device(i.positions),
        out=out.array,
        first_row=0,
        batch=case.rows,
        **covered,
    )
    return compare(variant, case, out.read(), reference.merge(partials, n_tiles), [out])


def _spoil_records(rng: np.random.Generator, partials: Array) -> None:
    """One record each of about half the rows: its maximum, its sum, or an element of its output. The latter far below
    the others, where its weight rounds to zero."""
    for row in np.flatnonzero(rng.random(len(partials)) < 0.5):
        head, tile = (int(rng.integers(0, n)) for n in partials.shape[1:3])
        record = partials[row, head, tile]
        record[...] = np.where(np.isnan(record), 1, record)
        record[1] = 1
        at = int(rng.integers(0, 3))
        record[at if at < 2 else int(rng.integers(2, len(record)))] = np.nan
        if at == 2:
            record[0] = -500


def check_quantize(variant: Variant, case: Case, device: Device) -> Result:
    """Rows written into a cache of 0xA5 bytes: right blocks at the positions, nothing elsewhere."""
    rng = np.random.default_rng(case.seed)
    capacity = case.ctx + UNSEEN
    positions = rng.permutation(capacity)[: case.rows].astype(np.int32)
    scale = {"large": 1e4, "zeros": 0.0, "foreign": 1e-7, "extreme": 1e38}.get(case.values, 1.0)
    names = ("k", "v") if variant.pair else ("x",)
    shape = (len(positions), case.n_kv_heads, case.head_dim)
    new = {name: np.float32(scale) * rng.standard_normal(shape, np.float32) for name in names}
    for x in new.values():
        if case.values == "extreme":
            x[::2] *= 1e-32  # within what a block can hold; the others are not
        if case.values == "spoilt":
            for kind in spoil.KINDS * 2:
                spoil.element(rng, x, kind)
    caches = {}
    for name in names:
        cache_name = f"{name}_cache" if variant.pair else "cache"
        caches[cache_name] = Guarded(device, kv_cache_shape(capacity, case.n_kv_heads, case.head_dim), np.uint8)
    launch(
        variant,
        device,
        positions=device.to_device(positions),
        **{n: device.to_device(x) for n, x in new.items()},
        **{n: g.array for n, g in caches.items()},
    )
    error, fault = 0.0, ""
    for x, guarded in zip(new.values(), caches.values(), strict=True):
        cache = guarded.read()
        error = max(error, reference.check_quantized(x, cache[positions]))
        untouched = np.delete(cache, positions, axis=0)
        if not (untouched == 0xFF).all() or not guarded.intact():
            fault = "wrote outside its positions"
        elif differs_from_quantize(x, cache[positions]).any():
            fault = "differs from quantize_q8_0"
    return Result(variant, case, error, 1.0, fault)


def differs_from_quantize(x: Array, blocks: Array) -> Array:
    """bool [...]: which blocks are not those of `quantize_q8_0` to the bit. Of one that is not for it, which holds NaN,
    an infinity or what is too large, nothing is said.

    Args:
        x: float32 [..., n]; blocks: uint8 [..., n // 32, 34].
    """
    each = x.reshape(*blocks.shape[:-1], Q8_BLOCK)
    legal = (np.abs(each) <= np.float32(Q8_MAX)).all(axis=-1)
    wanted = quantize_q8_0(np.where(legal[..., None], each, np.float32(0)))[..., 0, :]
    wrong: Array = legal & (wanted != blocks).any(axis=-1)
    return wrong


def check_draft(variant: Variant, case: Case, device: Device) -> Result:
    """Run a draft variant and compare with the oracle."""
    rng = np.random.default_rng(case.seed)
    q = rng.standard_normal((case.rows, case.n_heads, case.head_dim), np.float32)
    shape = (case.ctx + case.rows, case.n_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    if case.values == "large":
        q[::3] *= 12
    if case.values == "zeros":
        k[...], v[...] = 0, 0
    half = dict(variant.params).get("kv") == "f16"
    if case.values == "extreme":
        _make_extreme(rng, q)
        k, v = np.abs(k), np.clip(v, -2, 2) * np.float32(3e4 if half else 1e38)
    if half:
        k, v = k.astype(np.float16), v.astype(np.float16)
    causal = bool(variant.sliding and case.seed % 2)
    visible = draft_visible(case, len(k), causal)
    if case.values == "spoilt":
        spoil.call(rng, q, k, v, visible, None)
    written = [Guarded(device, q.shape)]
    held = DraftWorkspace()
    if variant.family.records:
        held.make(variant, device, case.rows, case.n_heads, case.n_kv_heads)
        written.append(Guarded(device, held.partials.shape, fill=STALE))
        held.partials = written[1].array
    arrays = [*(device.to_device(a) for a in (q, k, v)), written[0].array]
    draft_attend_rows(device, *arrays, variant=variant, window=case.window, causal=causal, workspace=held)
    want = reference.draft_attend(q, k, v, None, case.window, causal)
    let = excused(q, (k, k), v, visible, case.head_dim**-0.5, None, largest_of(variant))
    return compare(variant, case, written[0].read(), want, written, excused=let)


def draft_visible(case: Case, keys: int, causal: bool) -> Array:
    """bool [rows, keys]: which keys a row of a draft sees. Row r stands at keys - rows + r."""
    ahead = (keys - case.rows + np.arange(case.rows))[:, None] - np.arange(keys)
    seen = ahead >= 0 if causal else np.ones((case.rows, keys), bool)
    return seen & (abs(ahead) < case.window) if case.window else seen


def tile_twin(variant: Variant) -> Variant:
    """The tile-batched variant whose records a multi-row variant must reproduce."""
    return families()["attention_flash_q8_0_tile_batched"].variant(head_dim=variant.head_dim, mask="causal")
