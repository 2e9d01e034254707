"""The layouts that kernels, oracles and callers share. Each rule has this one owner.

Q8_0 block (34 bytes, 2-byte aligned): an f16 scale, little endian, then 32 signed int8 codes; value = scale * code.
KV cache: `uint8 [capacity][n_kv_heads][head_dim / 32][34]`, K and V in separate arrays.
Partials: `float32 [rows][n_heads][max_tiles][2 + head_dim]`; a record is {tile_max, tile_sum, out[head_dim]}, out not
normalised and indexed by dim. `max_tiles` is a stride: the kernel that writes and the one that reads must be given the
same value, whatever the live context is.
"""

from __future__ import annotations

Q8_BLOCK = 32
"""Values in one Q8_0 block."""

Q8_BYTES = 34
"""Bytes of one Q8_0 block."""

Q8_MAX = 127 * 65504.0
"""Largest magnitude a block can hold: code 127 at the largest f16 scale."""

TILE = 128
"""Keys per partial record."""

RECORD_HEAD = 2
"""Floats before `out` in a partial record: tile_max and tile_sum."""

MAX_HEAD_DIM = 256


def ceil_div(a: int, b: int) -> int:
    """The number of groups of b that cover a. `ceil_div(129, 128)` is 2, `ceil_div(0, 128)` is 0."""
    return -(-a // b)


def tiles(ctx: int) -> int:
    """Tiles that cover `ctx` keys; at least one, so that a stride or a grid is never zero."""
    return max(1, ceil_div(ctx, TILE))


def kv_cache_shape(capacity: int, n_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the K or V cache, uint8. 4 KV heads of 256 dims take 4 * 8 * 34 = 1,088 bytes a position."""
    return (capacity, n_kv_heads, head_dim // Q8_BLOCK, Q8_BYTES)


def partials_shape(rows: int, n_heads: int, max_tiles: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the partials, float32. 16 rows, 24 heads, 256 tiles, 256 dims: 101.4 MB."""
    return (rows, n_heads, max_tiles, RECORD_HEAD + head_dim)
