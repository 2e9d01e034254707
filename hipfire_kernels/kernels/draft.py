"""Draft attention: the block of the draft model against its own context."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hipfire_kernels.archs import WAVE, Arch
from hipfire_kernels.authoring.args import Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Site, Tolerance, Variant
from hipfire_kernels.kernels.arguments import (
    DRAFT,
    EXACT_F32,
    F16_MAX,
    HEAD_DIMS,
    MATRIX_ROWS,
    WIDE,
    ints,
    output,
    partials,
    query,
    splits_worth_timing,
)
from hipfire_kernels.layout import TILE, ceil_div, splits_for

F16_TWO_TERMS = Tolerance(worst_row=2e-4, least_weight=2.0**-40)
"""Queries, weights, and K and V that come as float32, are in two f16 terms (`templates/matrix.h`), right whether the
matrix unit reads subnormal f16 as they are or as zero: a number x, of queries with the scale and log2(e) in it, is off
by 2^-22 |x|, or 2^-25 where that is more. Weights are 2^15 times as large then: 2^-40, `least_weight`.

K and V that come as f16 are one term. One below 2^-14, the smallest normal f16, is exact where the unit keeps it and
zero where it does not (`checking/matrix_probe.py` asks). A score is then off by less than 2^-14 * scale * sum |q|, an
output by less than 2^-14: nothing beside K and V of usual size, all of it where these are so small throughout.
"""


def _draft_grid(v: Variant, s: SimpleNamespace) -> tuple[int, int, int]:
    return (s.rows, s.n_heads, 1)


DFLASH = KernelFamily(
    name="attention_dflash_f32",
    doc="one head, one query row of the draft block, whole context (f32 K and V)",
    params={"head_dim": HEAD_DIMS, "sliding": (False, True)},
    entry=lambda v: f"attention_dflash{'_sliding' if v.sliding else ''}_f32_d{v.head_dim // WAVE}",
    args=lambda v: (
        query(v),
        Tensor("k", "f32", ("keys", "n_kv_heads", v.head_dim)),
        Tensor("v", "f32", ("keys", "n_kv_heads", v.head_dim)),
        output(v),
        *ints("keys", "n_heads", "n_kv_heads"),
        Scalar("scale", "f32"),
        *(ints("rows", "window", "causal") if v.sliding else ()),
    ),
    grid=_draft_grid,
    block=4 * WAVE,
    lds=lambda v, arch: (Lds("scores", "float", TILE), Lds("weights", "float", TILE)),
    oracle=DRAFT,
    tolerance=EXACT_F32,
)


def _draft_matrix_args(v: Variant, result: Tensor, *extents: str) -> tuple[Tensor | Scalar, ...]:
    return (
        replace(query(v), align=WIDE, largest=F16_MAX),
        Tensor("k", v.kv, ("keys", "n_kv_heads", v.head_dim), align=WIDE, largest=F16_MAX),
        Tensor("v", v.kv, ("keys", "n_kv_heads", v.head_dim), align=WIDE, largest=F16_MAX),
        replace(result, align=WIDE),
        *ints("keys", "n_heads", "n_kv_heads", "rows", *extents),
        Scalar("scale", "f32"),
        *(ints("window", "causal") if v.sliding else ()),
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
        args=lambda v: _draft_matrix_args(v, output(v)),
        grid=lambda v, s: (s.n_kv_heads * ceil_div(s.rows * (s.n_heads // s.n_kv_heads), pairs), 1, 1),
        block=waves * WAVE,
        lds=lambda v, arch: tuple(Lds(term, "Chunk", pairs * v.head_dim // 8) for term in ("query_hi", "query_lo")),
        oracle=DRAFT,
        tolerance=F16_TWO_TERMS,
    )


DFLASH_M16 = _draft_matrix(1, (64, 128, 256))
DFLASH_M32 = _draft_matrix(2, (64, 128))

N64_WAVES, N64_KEYS = 4, 64
N64_RESIDENT = 2
"""Blocks that a multiprocessor holds at once."""


def _n64_lds(v: Variant, arch: Arch) -> tuple[Lds, ...]:
    """Two tiles of keys, and the queries' terms: NVIDIA keeps the first in registers, beside f32 keys.

    On AMD that is 65,536 bytes, all that a workgroup may have (HIP's sharedMemPerBlock); a runtime that keeps some of
    it for itself refuses the launch. Less would be a query term in registers: 64 more of gfx11's, which has none left.
    """
    in_registers = arch.dialect == "nvidia" and v.kv == "f32"
    names = ("first", "second", *(() if in_registers else ("query_hi",)), "query_lo")
    return tuple(Lds(name, "Chunk", N64_KEYS * v.head_dim // 8) for name in names)


def _n64_space(v: Variant, site: Site) -> dict[str, tuple[int, ...]]:
    """Not by the rows, whose bits would depend on how many there are."""
    return {"splits": splits_worth_timing(splits_for(N64_RESIDENT * site.multiprocessors, site.n_kv_heads))}


DFLASH_N64 = KernelFamily(
    name="attention_dflash_wmma_n64_f32",
    doc="64 (row, head) pairs of one KV head, the 64-key tiles of one split of the context",
    params={"head_dim": (128,), "kv": ("f32", "f16"), "sliding": (False, True)},
    entry=lambda v: f"attention_dflash_wmma_n64_f32{_draft_suffix(v)}",
    args=lambda v: _draft_matrix_args(v, partials(v, writes=True, records="splits"), "splits"),
    grid=lambda v, s: (
        s.n_kv_heads * ceil_div(s.rows * (s.n_heads // s.n_kv_heads), N64_WAVES * MATRIX_ROWS),
        s.splits,
        1,
    ),
    block=N64_WAVES * WAVE,
    lds=_n64_lds,
    oracle=DRAFT,
    tolerance=F16_TWO_TERMS,
    records="split",
    space=_n64_space,
)
