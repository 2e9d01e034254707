"""The kernel declarations. With its template, each is the whole truth about one family.

To add a variant, add a value to `params`. To add a family, add a declaration here and a template of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

from .archs import WAVE, Arch
from .family import KernelFamily, Lds, Scalar, Site, Tensor, Tolerance, Variant
from .layout import MAX_SPLITS, Q8_BLOCK, Q8_BYTES, RECORD_HEAD, SLAB_PITCH, SPLIT_KEYS, TILE, ceil_div, splits_for

HEAD_DIMS = tuple(range(Q8_BLOCK, 257, Q8_BLOCK))
MERGE_WAVES = 4
"""Waves that share the tiles of one (head, row). 24 heads x 16 rows alone would be three waves a processor of 132."""

EXACT_F32 = Tolerance(worst_row=1e-5)


def _query(v: Variant) -> Tensor:
    return Tensor("q", "f32", ("rows", "n_heads", v.head_dim))


def _cache(name: str, v: Variant) -> Tensor:
    return Tensor(name, "u8", ("capacity", "n_kv_heads", v.head_dim // Q8_BLOCK, Q8_BYTES))


def _partials(v: Variant, *, writes: bool, records: str = "max_tiles") -> Tensor:
    return Tensor("partials", "f32", ("batch_rows", "n_heads", records, RECORD_HEAD + v.head_dim), writes)


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
    lds=lambda v, arch: (Lds("scores", "float", TILE),),
    oracle="attend",
    records="tile",
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
    lds=lambda v, arch: (Lds("scores", "float", v.rows * TILE),),
    oracle="attend",
    records="tile",
    tolerance=EXACT_F32,
)

F16_MAX = 65504.0
"""The largest f16."""

WIDE = 16
"""Bytes that the matrix kernels load and store at once."""

SPLIT_THREADS = 8 * WAVE
SPLIT_GROUPS = tuple(range(1, 9))


def _split_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    return (
        _query(v),
        _cache("k_cache", v),
        _cache("v_cache", v),
        POSITIONS,
        _partials(v, writes=True, records="splits"),
        *_ints("n_kv_heads", "capacity", "splits", "first_row", "batch"),
        Scalar("scale", "f32"),
    )


def _verify_mma_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    """K and V become f16: a block whose scale may bring a value beyond that comes out as infinity or NaN. Queries are
    read 16 bytes at a time, records written 8."""
    align = {"q": WIDE, "partials": 8}
    largest = {"k_cache": F16_MAX, "v_cache": F16_MAX}
    return tuple(
        replace(arg, align=align.get(arg.name, arg.align), largest=largest.get(arg.name, arg.largest))
        if isinstance(arg, Tensor)
        else arg
        for arg in _split_args(v)
    )


def _split_grid(v: Variant, s: SimpleNamespace) -> tuple[int, int, int]:
    return (s.splits, s.n_kv_heads, ceil_div(s.batch, v.rows))


def _split_entry(v: Variant) -> str:
    return f"{v.family.name}_r{v.rows}_g{v.group}_d{v.head_dim // WAVE}"


SPLIT_SHARES = (1 / 4, 1 / 2, 3 / 4, 3 / 2, 2)
"""Of the default number of splits: what else is worth timing. Fewer leave less to merge, more are more evenly long."""


def _splits_worth_timing(default: int) -> tuple[int, ...]:
    others = (min(MAX_SPLITS, max(1, round(share * default))) for share in SPLIT_SHARES)
    return tuple(dict.fromkeys((default, *others)))


def _split_space(v: Variant, site: Site) -> dict[str, tuple[int, ...]]:
    """Rows of a group, and splits. By default the splits of all row groups fill the device together, but where they
    must not follow the rows those of one do. Half the rows are read twice as often, by twice as many blocks."""
    groups = 1 if v.family.exact else ceil_div(site.rows, v.rows)
    default = splits_for(site.multiprocessors, site.n_kv_heads, groups)
    fewer = tuple(rows for rows in v.family.params["rows"] if 2 * rows == v.rows)
    return {"rows": (v.rows, *fewer), "splits": _splits_worth_timing(default)}


def _other_group(v: Variant, s: SimpleNamespace) -> str | None:
    if s.n_heads == s.n_kv_heads * v.group:
        return None
    return f"n_heads is {s.n_heads} with {s.n_kv_heads} KV heads; required: {v.group} query heads for each KV head"


GQA_COLUMNS = 96
"""(row, head) pairs of a block: their sums over 256 dims are 96 registers of each of 256 threads."""


def _verify_gqa_lds(v: Variant, arch: Arch) -> tuple[Lds, ...]:
    a_wave = 2 * ceil_div(v.rows * v.group, 16)  # columns
    queries, weights = 2 * 8 * a_wave * SLAB_PITCH, 8 * SPLIT_KEYS * 4 * ceil_div(a_wave, 4)
    return (
        Lds("queries", "Quad", max(queries, weights) // 4),
        Lds("keys", "Quad", 2 * SPLIT_KEYS * SLAB_PITCH // 4),
        Lds("state", "float", 2 * 8 * 2 * a_wave),
    )


VERIFY_GQA = KernelFamily(
    name="attention_verify_gqa_q8",
    doc="one KV head, one split of the context, up to 32 query rows with all heads of the group: K and V are read once",
    params={"head_dim": (128, 256), "group": SPLIT_GROUPS, "rows": (4, 8, 16, 32)},
    where=lambda v: v.rows * v.group <= GQA_COLUMNS,
    entry=_split_entry,
    args=_split_args,
    refuse=_other_group,
    grid=_split_grid,
    block=SPLIT_THREADS,
    lds=_verify_gqa_lds,
    oracle="split",
    records="split",
    space=_split_space,
    tolerance=Tolerance(EXACT_F32.worst_row, per_key=2.0**-25),
    graph_safe=True,
)


MMA_COLUMNS = {1: 96, 2: 48}
"""(row, head) pairs of a block, by terms: their sums over 256 dims are 96 registers of each of 256 threads, and as f16
their queries 48 KiB of LDS."""


def _verify_mma_lds(v: Variant, arch: Arch) -> tuple[Lds, ...]:
    if arch.dialect == "nvidia":
        return (Lds("arena", "unsigned char", _warpgroup_bytes(v)),)
    columns = 16 * ceil_div(v.rows * v.group, 16)
    return (
        Lds("queries", "Chunk", v.terms * columns * v.head_dim // 8),
        Lds("weights", "Chunk", v.terms * columns * SPLIT_KEYS // 8),
        Lds("tops", "float", 4 * columns),
        Lds("references", "float", 2 * columns),
        Lds("bounds", "int", v.rows),
        Lds("spoilt", "int", 1),
    )


def _warpgroup_bytes(v: Variant) -> int:
    """Shared memory of the form for NVIDIA's warpgroups: queries, weights, a ring of tiles, what the softmax keeps. The
    template holds its own layout against this in both directions."""
    columns = 8 * ceil_div(v.rows * v.group, 8)
    shared = v.head_dim * columns > 256 * 48
    slots, weights, references = (7, 4, 1) if shared else (8, 2, 2)
    tile = SPLIT_KEYS * (272 if v.head_dim == 256 else 144)
    operands = 2 * v.terms * columns * (v.head_dim + weights * SPLIT_KEYS)
    return int(operands + slots * (tile + 16) + 4 * columns * (8 * references + 5) + 4 * (8 + 2 + 32 + 1))


def _verify_mma_threads(v: Variant, arch: Arch) -> int:
    """On NVIDIA two warpgroups that compute and one that copies."""
    return 12 * WAVE if arch.dialect == "nvidia" else SPLIT_THREADS


VERIFY_MMA = KernelFamily(
    name="attention_verify_mma_q8",
    doc="one KV head, one split of the context, up to 16 query rows with all heads of the group, on matrix units",
    params={"head_dim": (128, 256), "group": SPLIT_GROUPS, "rows": (4, 8, 16), "terms": (1, 2)},
    where=lambda v: v.rows * v.group <= MMA_COLUMNS[v.terms],
    entry=lambda v: _split_entry(v) + ("" if v.terms == 1 else f"_t{v.terms}"),
    args=_verify_mma_args,
    refuse=_other_group,
    grid=_split_grid,
    block=_verify_mma_threads,
    lds=_verify_mma_lds,
    oracle="split",
    records="split",
    space=_split_space,
    tolerance=lambda v: Tolerance(1.5e-3 if v.terms == 1 else 3e-5, grows=True),
    exact=False,
    graph_safe=True,
)


def _reduce_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    if v.bound == "splits":
        return (
            _partials(v, writes=False, records="splits"),
            POSITIONS,
            _output(v),
            *_ints("n_heads", "splits", "first_row", "ctx"),
        )
    return (
        _partials(v, writes=False),
        POSITIONS,
        _output(v),
        *_ints("n_heads", "max_tiles", "live_tiles", "first_row"),
        *(_ints("block_cols") if v.bound == "tree" else ()),
    )


def _reduce_grid(v: Variant, s: SimpleNamespace) -> tuple[int, int, int]:
    slices = v.head_dim // 64 if v.bound == "splits" else 1  # more blocks, since there are fewer records than tiles
    return (s.n_heads * slices, s.batch, 1)


def _reduce_lds(v: Variant, arch: Arch) -> tuple[Lds, ...]:
    if v.bound == "splits":
        parts = Lds("parts", "float", MERGE_WAVES * 64)
        return (Lds("weights", "float", MAX_SPLITS), parts, Lds("sums", "float", 2 * MERGE_WAVES))
    return (Lds("parts", "float", MERGE_WAVES * v.head_dim), Lds("sums", "float", MERGE_WAVES))


REDUCE = KernelFamily(
    name="attention_flash_reduce_batched",
    doc="one head, one query row (two dims a thread, for splits): merges the partials of every attention family",
    params={"head_dim": HEAD_DIMS, "bound": ("causal", "tree", "splits")},
    where=lambda v: v.bound != "splits" or v.head_dim in VERIFY_GQA.params["head_dim"],
    entry=lambda v: (
        f"attention_flash_reduce_batched_d{v.head_dim // WAVE}" + ("" if v.bound == "causal" else f"_{v.bound}")
    ),
    args=_reduce_args,
    extents=("batch",),
    grid=_reduce_grid,
    block=MERGE_WAVES * WAVE,
    lds=_reduce_lds,
    oracle="merge",
    tolerance=EXACT_F32,
    graph_safe=True,
    early=lambda v: bool(v.bound == "splits"),
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
    lds=lambda v, arch: (Lds("scores", "float", TILE), Lds("weights", "float", TILE)),
    oracle="draft",
    tolerance=EXACT_F32,
)

MATRIX_ROWS = 16
"""Query rows, or (row, head) pairs of a KV head, that one wave on matrix units takes: the rows of a fragment."""

F16_TWO_TERMS = Tolerance(worst_row=2e-4)

PREFILL = KernelFamily(
    name="attention_q8_0_flash_prefill_wmma",
    doc="one head, 16 query rows, whole context on matrix units",
    params={"head_dim": (128, 256)},
    entry=lambda v: f"attention_q8_0_flash_prefill_wmma_d{v.head_dim // WAVE}",
    args=lambda v: (
        replace(_query(v), align=WIDE),
        _cache("k_cache", v),
        _cache("v_cache", v),
        POSITIONS,
        replace(_output(v), align=WIDE),
        *_ints("n_heads", "n_kv_heads", "rows", "ctx"),
        Scalar("scale", "f32"),
    ),
    grid=lambda v, s: (s.n_heads, ceil_div(s.rows, MATRIX_ROWS), 1),
    lds=lambda v, arch: (
        *(Lds(name, "Chunk", MATRIX_ROWS * v.head_dim // 8) for name in ("query_hi", "query_lo", "values")),
        Lds("turn", "float", MATRIX_ROWS * (MATRIX_ROWS + 1)),
        Lds("value_scale", "float", MATRIX_ROWS * v.head_dim // Q8_BLOCK),
    ),
    oracle="attend",
    tolerance=Tolerance(worst_row=1e-3),
    graph_safe=True,
)


def _draft_matrix_args(v: Variant, result: Tensor, *extents: str) -> tuple[Tensor | Scalar, ...]:
    return (
        replace(_query(v), align=WIDE),
        Tensor("k", v.kv, ("keys", "n_kv_heads", v.head_dim), align=WIDE, largest=F16_MAX),
        Tensor("v", v.kv, ("keys", "n_kv_heads", v.head_dim), align=WIDE, largest=F16_MAX),
        replace(result, align=WIDE),
        *_ints("keys", "n_heads", "n_kv_heads", "rows", *extents),
        Scalar("scale", "f32"),
        *(_ints("window", "causal") if v.sliding else ()),
    )


def _draft_suffix(v: Variant) -> str:
    return ("_f16kv" if v.kv == "f16" else "") + ("_sliding" if v.sliding else "")


def _draft_matrix(waves: int, head_dims: tuple[int, ...]) -> KernelFamily:
    """The draft kernels whose waves walk the whole context in steps of 16 keys."""
    pairs = waves * MATRIX_ROWS
    name = "attention_dflash_wmma" + ("" if waves == 1 else f"_m{pairs}") + "_f32"
    return KernelFamily(
        name=name,
        doc=f"{pairs} (row, head) pairs of one KV head, whole context in steps of 16 keys",
        params={"head_dim": head_dims, "kv": ("f32", "f16"), "sliding": (False, True)},
        entry=lambda v: f"{name}_d{v.head_dim // WAVE}{_draft_suffix(v)}",
        args=lambda v: _draft_matrix_args(v, _output(v)),
        grid=lambda v, s: (s.n_kv_heads * ceil_div(s.rows * (s.n_heads // s.n_kv_heads), pairs), 1, 1),
        block=waves * WAVE,
        lds=lambda v, arch: tuple(Lds(term, "Chunk", pairs * v.head_dim // 8) for term in ("query_hi", "query_lo")),
        oracle="draft",
        tolerance=F16_TWO_TERMS,
    )


DFLASH_M16 = _draft_matrix(1, (64, 128, 256))
DFLASH_M32 = _draft_matrix(2, (64, 128))

N64_WAVES, N64_KEYS = 4, 64
N64_RESIDENT = 2
"""Blocks that a multiprocessor holds at once."""


def _n64_lds(v: Variant, arch: Arch) -> tuple[Lds, ...]:
    """Two tiles of keys, and the queries' terms: NVIDIA keeps the first in registers, beside f32 keys."""
    in_registers = arch.dialect == "nvidia" and v.kv == "f32"
    names = ("first", "second", *(() if in_registers else ("query_hi",)), "query_lo")
    return tuple(Lds(name, "Chunk", N64_KEYS * v.head_dim // 8) for name in names)


def _n64_space(v: Variant, site: Site) -> dict[str, tuple[int, ...]]:
    """Not by the rows, whose bits would depend on how many there are."""
    return {"splits": _splits_worth_timing(splits_for(N64_RESIDENT * site.multiprocessors, site.n_kv_heads))}


DFLASH_N64 = KernelFamily(
    name="attention_dflash_wmma_n64_f32",
    doc="64 (row, head) pairs of one KV head, the 64-key tiles of one split of the context",
    params={"head_dim": (128,), "kv": ("f32", "f16"), "sliding": (False, True)},
    entry=lambda v: f"attention_dflash_wmma_n64_f32{_draft_suffix(v)}",
    args=lambda v: _draft_matrix_args(v, _partials(v, writes=True, records="splits"), "splits"),
    grid=lambda v, s: (
        s.n_kv_heads * ceil_div(s.rows * (s.n_heads // s.n_kv_heads), N64_WAVES * MATRIX_ROWS),
        s.splits,
        1,
    ),
    block=N64_WAVES * WAVE,
    lds=_n64_lds,
    oracle="draft",
    tolerance=F16_TWO_TERMS,
    records="split",
    space=_n64_space,
)

_FAMILIES = MappingProxyType(
    {
        f.name: f
        for f in (
            KV_WRITE,
            TILE_BATCHED,
            ROWS,
            VERIFY_GQA,
            VERIFY_MMA,
            REDUCE,
            DFLASH,
            DFLASH_M16,
            DFLASH_M32,
            DFLASH_N64,
            PREFILL,
        )
    }
)


def families() -> Mapping[str, KernelFamily]:
    """Every kernel family by name."""
    return _FAMILIES
