"""Verify attention: a block of query rows against the Q8_0 cache, and what merges the partial records."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hipfire_kernels.archs import WAVE, Arch
from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Site, Tolerance, Variant
from hipfire_kernels.kernels.arguments import (
    ATTEND,
    EXACT_F32,
    F16_MAX,
    HEAD_DIMS,
    MATRIX_ROWS,
    MERGE,
    POSITIONS,
    SPLIT,
    TREE_BIAS,
    WIDE,
    ints,
    output,
    outside_arrays,
    partials,
    q8_cache,
    query,
    splits_worth_timing,
)
from hipfire_kernels.layout import MAX_SPLITS, Q8_BLOCK, SLAB_PITCH, SPLIT_KEYS, TILE, ceil_div, splits_for

MERGE_WAVES = 4
"""Waves that share the tiles of one (head, row). 24 heads x 16 rows alone would be three waves a processor of 132."""


def _attended(v: Variant, records: str = "max_tiles") -> tuple[Tensor, ...]:
    """The arrays that a kernel of the first launch begins with."""
    return (
        query(v),
        q8_cache("k_cache", v),
        q8_cache("v_cache", v),
        POSITIONS,
        partials(v, writes=True, records=records),
    )


def _tile_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    mask = {"causal": (), "window": ints("window"), "tree": ints("block_cols")}[v.mask]
    return (
        *_attended(v),
        *((TREE_BIAS,) if v.mask == "tree" else ()),
        *ints("n_heads", "n_kv_heads", "max_tiles", "first_row"),
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
    extents={"live_tiles": (0, 2048), "batch": (1, 32)},
    refuse=outside_arrays,
    grid=lambda v, s: (s.n_heads, s.live_tiles, s.batch),
    lds=lambda v, arch: (Lds("scores", "float", TILE),),
    oracle=ATTEND,
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
        *_attended(v),
        *ints("n_heads", "n_kv_heads", "max_tiles", "first_row", "batch"),
        Scalar("scale", "f32"),
    ),
    extents={"live_tiles": (0, 2048)},
    refuse=outside_arrays,
    grid=lambda v, s: (s.n_heads, s.live_tiles, ceil_div(s.batch, v.rows)),
    lds=lambda v, arch: (Lds("scores", "float", v.rows * TILE),),
    oracle=ATTEND,
    records="tile",
    tolerance=EXACT_F32,
)

SPLIT_THREADS = 8 * WAVE
SPLIT_GROUPS = tuple(range(1, 9))


def _split_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    return (
        *_attended(v, records="splits"),
        *ints("n_kv_heads", "capacity", "splits", "first_row", "batch"),
        Scalar("scale", "f32"),
    )


def _verify_mma_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    """Queries, K and V become f16. Queries are read 16 bytes at a time, records written 8."""
    align = {"q": WIDE, "partials": 8}
    largest = {"q": F16_MAX, "k_cache": F16_MAX, "v_cache": F16_MAX}
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


def _split_space(v: Variant, site: Site) -> dict[str, tuple[int, ...]]:
    """Rows of a group, and splits. By default the splits of all row groups fill the device together, but where they
    must not follow the rows those of one do. Half the rows are read twice as often, by twice as many blocks."""
    groups = 1 if v.family.exact else ceil_div(site.rows, v.rows)
    default = splits_for(site.multiprocessors, site.n_kv_heads, groups)
    fewer = tuple(rows for rows in v.family.params["rows"] if 2 * rows == v.rows)
    return {"rows": (v.rows, *fewer), "splits": splits_worth_timing(default)}


def _not_of_the_variant(v: Variant, s: SimpleNamespace) -> str | None:
    if s.n_heads == s.n_kv_heads * v.group:
        return outside_arrays(v, s)
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
    refuse=_not_of_the_variant,
    grid=_split_grid,
    block=SPLIT_THREADS,
    lds=_verify_gqa_lds,
    oracle=SPLIT,
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


def _verify_mma_tolerance(v: Variant) -> Tolerance:
    """Of one term: queries, weights, and the products of codes and scales are rounded to f16. Where the matrix unit
    reads subnormal f16 as zero, products below 2^-14 are: an output is off by less than 2^-14 for it, and a score by
    less than 2^-14 * scale * sum |q|. So are queries, with the scale and log2(e) in them: a score is off by less than
    2^-14 * ln 2 * sum |k|. Weights lose nothing above 2^-29 of the largest there: they are 2^15 times as large.

    Of two terms (`templates/matrix.h`): the products are exact either way. They are multiples of 2^-24 of at most 19
    bits, and one that is subnormal has 10 bits, all in the second term. Queries, with the scale and log2(e) in them,
    are off by 2^-22 of themselves, or 2^-25 where that is more; so are weights, which are multiplied first: with 2^15,
    or on NVIDIA, where they may be 2^8 above the reference, with 2^7. `least_weight` is the larger one, 2^-25 / 2^7.
    """
    if v.terms == 1:
        return Tolerance(1.5e-3, grows=True)
    return Tolerance(3e-5, grows=True, least_weight=2.0**-32)


VERIFY_MMA = KernelFamily(
    name="attention_verify_mma_q8",
    doc="one KV head, one split of the context, up to 16 query rows with all heads of the group, on matrix units",
    params={"head_dim": (128, 256), "group": SPLIT_GROUPS, "rows": (4, 8, 16), "terms": (1, 2)},
    where=lambda v: v.rows * v.group <= MMA_COLUMNS[v.terms],
    entry=lambda v: _split_entry(v) + ("" if v.terms == 1 else f"_t{v.terms}"),
    args=_verify_mma_args,
    refuse=_not_of_the_variant,
    grid=_split_grid,
    block=_verify_mma_threads,
    lds=_verify_mma_lds,
    oracle=SPLIT,
    records="split",
    space=_split_space,
    tolerance=_verify_mma_tolerance,
    exact=False,
    graph_safe=True,
)


def _reduce_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    if v.bound == "splits":
        return (
            partials(v, writes=False, records="splits"),
            POSITIONS,
            output(v),
            *ints("n_heads", "splits", "first_row", "ctx"),
        )
    return (
        partials(v, writes=False),
        POSITIONS,
        output(v),
        *ints("n_heads", "max_tiles", "live_tiles", "first_row"),
        *(ints("block_cols") if v.bound == "tree" else ()),
    )


def _reduce_grid(v: Variant, s: SimpleNamespace) -> tuple[int, int, int]:
    slices = v.head_dim // 64 if v.bound == "splits" else 1  # more blocks, since there are fewer records than tiles
    return (s.batch, s.n_heads * slices, 1)


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
    extents={"batch": (1, 32)},
    refuse=outside_arrays,
    grid=_reduce_grid,
    block=MERGE_WAVES * WAVE,
    lds=_reduce_lds,
    oracle=MERGE,
    tolerance=EXACT_F32,
    graph_safe=True,
    early=lambda v: bool(v.bound == "splits"),
)


PREFILL = KernelFamily(
    name="attention_q8_0_flash_prefill_wmma",
    doc="one head, 16 query rows, whole context on matrix units",
    params={"head_dim": (128, 256)},
    entry=lambda v: f"attention_q8_0_flash_prefill_wmma_d{v.head_dim // WAVE}",
    args=lambda v: (
        replace(query(v), align=WIDE, largest=F16_MAX),
        q8_cache("k_cache", v),
        q8_cache("v_cache", v),
        POSITIONS,
        replace(output(v), align=WIDE),
        *ints("n_heads", "n_kv_heads", "rows", "ctx"),
        Scalar("scale", "f32"),
    ),
    grid=lambda v, s: (s.n_heads, ceil_div(s.rows, MATRIX_ROWS), 1),
    lds=lambda v, arch: (
        *(Lds(name, "Chunk", MATRIX_ROWS * v.head_dim // 8) for name in ("query_hi", "query_lo", "values")),
        Lds("turn", "float", MATRIX_ROWS * (MATRIX_ROWS + 1)),
        Lds("value_scale", "float", MATRIX_ROWS * v.head_dim // Q8_BLOCK),
        Lds("spoil", "float", MATRIX_ROWS),
    ),
    oracle=ATTEND,
    tolerance=Tolerance(worst_row=1e-3),
    graph_safe=True,
)
