"""Writing the KV cache."""

from __future__ import annotations

from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.kernels.arguments import EXACT_F32, POSITIONS, Q8_ALIGN, QUANTIZE, ints
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES


def _kv_write_args(v: Variant) -> tuple[Tensor | Scalar, ...]:
    def new(name: str) -> Tensor:
        return Tensor(name, "f32", ("rows", "n_kv_heads", "head_dim"))

    def cache(name: str) -> Tensor:
        return Tensor(name, "u8", ("capacity", "n_kv_heads", "head_blocks", Q8_BYTES), writes=True, align=Q8_ALIGN)

    if v.pair:
        return (
            new("k"),
            new("v"),
            cache("k_cache"),
            cache("v_cache"),
            POSITIONS,
            *ints("n_kv_heads", "head_blocks"),
        )
    return (new("x"), cache("cache"), POSITIONS, *ints("n_kv_heads", "head_blocks"))


KV_WRITE = KernelFamily(
    name="kv_cache_write_q8_0_batched",
    doc="one Q8_0 block of one position",
    params={"pair": (False, True)},
    entry=lambda v: "kv_cache_write_q8_0_pair_batched" if v.pair else "kv_cache_write_q8_0_batched",
    args=_kv_write_args,
    grid=lambda v, s: (s.rows, s.n_kv_heads * s.head_blocks, 2 if v.pair else 1),
    oracle=QUANTIZE,
    refuse=lambda v, s: (
        None
        if s.head_dim == Q8_BLOCK * s.head_blocks
        else f"head_dim is {s.head_dim}; required: {Q8_BLOCK * s.head_blocks}, the {s.head_blocks} blocks of the cache"
    ),
    tolerance=EXACT_F32,
    graph_safe=True,
)
