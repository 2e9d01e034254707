"""The kernel declarations. With its template, each is the whole truth about one family.

To add a variant, add a value to `params`. To add a family, add a declaration here and a template of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

from .archs import WAVE
from .family import KernelFamily, Lds, Scalar, Tensor, Tolerance, Variant
from .layout import Q8_BLOCK, Q8_BYTES, RECORD_HEAD, TILE, ceil_div

HEAD_DIMS = tuple(range(Q8_BLOCK, 257, Q8_BLOCK))
MERGE_WAVES = 4
"""Waves that share the tiles of one (head, row). 24 heads x 16 rows alone would be three waves a processor of 132."""

EXACT_F32 = Tolerance(worst_row=1e-5)


def _query(v: Variant) -> Tensor:
    return Tensor("q", "f32", ("rows", "n_heads", v.head_dim))


def _cache(name: str, v: Variant) -> Tensor:
    return Tensor(name, "u8", ("capacity", "n_kv_heads", v.head_dim // Q8_BLOCK, Q8_BYTES))


def _partials(v: Variant, *, writes: bool) -> Tensor:
    return Tensor("partials", "f32", ("batch_rows", "n_heads", "max_tiles", RECORD_HEAD + v.head_dim), writes)


def _output(v: Variant) -> Tensor:
    return Tensor("out", "f32", ("rows", "n_heads", v.head_dim), writes=True)


POSITIONS = Tensor("positions", "i32", ("rows",))
TREE_BIAS = Tensor("tree_bias", "f32", ("rows", "block_cols"))


def _ints(*names: str) -> tuple[Scalar, ...]:
    return tuple(Scalar(name, "i32") for name in names)


def _kv_write_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    def new(name: str) -> Tensor:
        return Tensor(name, "f32", ("rows", "n_kv_heads", "head_dim"))

    def cache(name: str) -> Tensor:
        return Tensor(name, "u8", ("capacity", "n_kv_heads", "head_blocks", Q8_BYTES), writes=True)

    if v.pair:
        return (new("k"), new("v"), cache("k_cache"), cache("v_cache"), POSITIONS, *_ints("n_kv_heads", "head_blocks"))
    return (new("x"), cache("cache"), POSITIONS, *_ints("n_kv_heads", "head_blocks"))


KV_WRITE = KernelFamily(
    name="kv_cache_write_q8_0_batched",
    doc="one Q8_0 block of one position",
    params={"pair": (False, True)},
    entry=lambda v: "kv_cache_write_q8_0_pair_batched" if v.pair else "kv_cache_write_q8_0_batched",
    args=_kv_write_args,
    grid=lambda v, s: (s.n_kv_heads * s.head_blocks, s.rows, 2 if v.pair else 1),
    oracle="quantize",
    tolerance=EXACT_F32,
    graph_safe=True,
)


def _tile_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    mask = {"causal": (), "window": _ints("window"), "tree": _ints("block_cols")}[v.mask]
    return (
        _query(v),
        _cache("k_cache", v),
        _cache("v_cache", v),
        POSITIONS,
        _partials(v, writes=True),
        *((TREE_BIAS,) if v.mask == "tree" else ()),
        *_ints("n_heads", "n_kv_heads", "max_tiles", "first_row"),
        Scalar("scale", "f32"),
        *mask,
    )


TILE_BATCHED = KernelFamily(
    name="attention_flash_q8_0_tile_batched",
    doc="one head, one 128-key tile, one query row",
    params={"head_dim": HEAD_DIMS, "mask": ("causal", "window", "tree")},
    entry=lambda v: (
        f"attention_flash_q8_0_tile_batched_d{v.head_dim // WAVE}" + ("" if v.mask == "causal" else f"_{v.mask}")
    ),
    args=_tile_args,
    extents=("live_tiles", "batch"),
    grid=lambda v, s: (s.n_heads, s.live_tiles, s.batch),
    lds=lambda v: (Lds("scores", "float", TILE),),
    oracle="attend",
    tolerance=EXACT_F32,
    graph_safe=True,
)

ROWS = KernelFamily(
    name="attention_flash_q8_0_rows",
    doc="one head, one 128-key tile, 4 or 8 adjacent query rows: K and V are read once for the group",
    params={"rows": (4, 8), "head_dim": (128, 256)},
    entry=lambda v: f"attention_flash_q8_0_rows{v.rows}_d{v.head_dim // WAVE}",
    args=lambda v: (
        _query(v),
        _cache("k_cache", v),
        _cache("v_cache", v),
        POSITIONS,
        _partials(v, writes=True),
        *_ints("n_heads", "n_kv_heads", "max_tiles", "first_row", "batch"),
        Scalar("scale", "f32"),
    ),
    extents=("live_tiles",),
    grid=lambda v, s: (s.n_heads, s.live_tiles, ceil_div(s.batch, v.rows)),
    lds=lambda v: (Lds("scores", "float", v.rows * TILE),),
    oracle="attend",
    tolerance=EXACT_F32,
)

REDUCE = KernelFamily(
    name="attention_flash_reduce_batched",
    doc="one head, one query row: merges the tile partials of every attention family",
    params={"head_dim": HEAD_DIMS, "tree": (False, True)},
    entry=lambda v: f"attention_flash_reduce_batched_d{v.head_dim // WAVE}" + ("_tree" if v.tree else ""),
    args=lambda v: (
        _partials(v, writes=False),
        POSITIONS,
        _output(v),
        *_ints("n_heads", "max_tiles", "live_tiles", "first_row"),
        *(_ints("block_cols") if v.tree else ()),
    ),
    extents=("batch",),
    grid=lambda v, s: (s.n_heads, s.batch, 1),
    block=MERGE_WAVES * WAVE,
    lds=lambda v: (Lds("parts", "float", MERGE_WAVES * v.head_dim), Lds("sums", "float", MERGE_WAVES)),
    oracle="merge",
    tolerance=EXACT_F32,
    graph_safe=True,
)


def _draft_grid(v: Variant, s: SimpleNamespace) -> tuple[int, int, int]:
    return (s.n_heads, s.rows, 1)


DFLASH = KernelFamily(
    name="attention_dflash_f32",
    doc="one head, one query row of the draft block, whole context (f32 K and V)",
    params={"head_dim": HEAD_DIMS, "sliding": (False, True)},
    entry=lambda v: f"attention_dflash{'_sliding' if v.sliding else ''}_f32_d{v.head_dim // WAVE}",
    args=lambda v: (
        _query(v),
        Tensor("k", "f32", ("keys", "n_kv_heads", v.head_dim)),
        Tensor("v", "f32", ("keys", "n_kv_heads", v.head_dim)),
        _output(v),
        *_ints("keys", "n_heads", "n_kv_heads"),
        Scalar("scale", "f32"),
        *(_ints("rows", "window", "causal") if v.sliding else ()),
    ),
    grid=_draft_grid,
    block=4 * WAVE,
    lds=lambda v: (Lds("scores", "float", TILE), Lds("weights", "float", TILE)),
    oracle="draft",
    tolerance=EXACT_F32,
)

_FAMILIES = MappingProxyType({f.name: f for f in (KV_WRITE, TILE_BATCHED, ROWS, REDUCE, DFLASH)})


def families() -> Mapping[str, KernelFamily]:
    """Every kernel family by name."""
    return _FAMILIES
