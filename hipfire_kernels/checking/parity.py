"""Hold a kernel against the float64 oracle on one case: poisoned, guarded, worst row.

A `Case` is seeds and numbers, no tensors, so it can be printed, stored and replayed. `check` runs a variant on it:
before the launch outputs are NaN and scratch is stale, both stand between guard regions, and cache bytes that no row
may see hold NaN scales; inputs must come out unchanged. The error of a (row, head) is max|diff| / max|reference|; a
case is as good as its worst.
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
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.result import Checked
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import Q8_BLOCK, TILE, kv_cache_shape, partials_shape, tiles
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
        return self.line(f"{self.variant.name} {self.case.describe()}")


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
    caches = [_cache(case, visible, rng) for _ in range(2)]
    return Inputs(q, caches[0], caches[1], positions, _tree_bias(case, rng))


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


def row_errors(got: Array, want: Array) -> Array:
    """max|diff| / max|want| over the last axis; infinite where a value is not finite, or a row that must be zero is
    not."""
    diff = np.abs(got - want).max(axis=-1, initial=0.0)
    size = np.abs(want).max(axis=-1, initial=0.0)
    ratio = np.where(size > 0, diff / np.where(size > 0, size, 1), np.where(diff > 0, np.inf, 0))
    return np.where(np.isfinite(got).all(axis=-1), ratio, np.inf)


def worst_row(got: Array, want: Array) -> float:
    """The worst of `row_errors`."""
    return float(row_errors(got, want).max(initial=0.0))


def compare(variant: Variant, case: Case, got: Array, want: Array, guarded: Sequence[Guarded], changed: bool) -> Result:
    """An output held against the oracle's, and what else may be wrong: NaN, a written guard, a changed input."""
    fault = ""
    if np.isnan(got).any():
        row, head, dim = np.argwhere(np.isnan(got))[0]
        fault = f"NaN or unwritten at row {row}, head {head}, dim {dim}"
    if not all(g.intact() for g in guarded):
        fault = "wrote outside an array"
    if changed:
        fault = "changed an input"
    return Result(variant, case, worst_row(got, want), variant.tolerance.worst_row, fault)


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
    return compare(variant, case, got, expected(case), guarded, _digest(case) != before)


def check_merge(variant: Variant, case: Case, device: Device) -> Result:
    """Random records; those behind a row's bound, and those with no key, hold NaN."""
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
    partials[skipped] = np.nan
    partials[skipped, 1] = 0
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
    return compare(variant, case, out.read(), reference.merge(partials, n_tiles), [out], changed=False)


def check_quantize(variant: Variant, case: Case, device: Device) -> Result:
    """Rows written into a cache of 0xA5 bytes: right blocks at the positions, nothing elsewhere."""
    rng = np.random.default_rng(case.seed)
    capacity = case.ctx + UNSEEN
    positions = rng.permutation(capacity)[: case.rows].astype(np.int32)
    scale = {"large": 1e4, "zeros": 0.0, "foreign": 1e-7}.get(case.values, 1.0)
    names = ("k", "v") if variant.pair else ("x",)
    new = {n: scale * rng.standard_normal((len(positions), case.n_kv_heads, case.head_dim), np.float32) for n in names}
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
        elif not np.array_equal(cache[positions], quantize_q8_0(x)):
            fault = "differs from quantize_q8_0"
    return Result(variant, case, error, 1.0, fault)


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
    if dict(variant.params).get("kv") == "f16":
        k, v = k.astype(np.float16), v.astype(np.float16)
    causal = bool(variant.sliding and case.seed % 2)
    written = [Guarded(device, q.shape)]
    held = DraftWorkspace()
    if variant.family.records:
        held.make(variant, device, case.rows, case.n_heads, case.n_kv_heads)
        written.append(Guarded(device, held.partials.shape, fill=STALE))
        held.partials = written[1].array
    arrays = [*(device.to_device(a) for a in (q, k, v)), written[0].array]
    draft_attend_rows(device, *arrays, variant=variant, window=case.window, causal=causal, workspace=held)
    want = reference.draft_attend(q, k, v, None, case.window, causal)
    return compare(variant, case, written[0].read(), want, written, changed=False)


def tile_twin(variant: Variant) -> Variant:
    """The tile-batched variant whose records a multi-row variant must reproduce."""
    return families()["attention_flash_q8_0_tile_batched"].variant(head_dim=variant.head_dim, mask="causal")
