"""The layouts that kernels, oracles and callers share. Each rule has this one owner.

Q8_0 block (34 bytes, 2-byte aligned): an f16 scale, little endian, then 32 signed int8 codes; value = scale * code.
KV cache: `uint8 [capacity][n_kv_heads][head_dim / 32][34]`, K and V in separate arrays.
Partials: `float32 [rows][n_heads][max_tiles][2 + head_dim]`; a record is {tile_max, tile_sum, out[head_dim]}, out not
normalised and indexed by dim. `max_tiles` is a stride: the kernel that writes and the one that reads must be given the
same value, whatever the live context is. A split kernel has a record for each split in place of one for each tile; it
writes {tile_max, tile_sum} of all of them, and out where the sum is above 0.
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

SPLIT_KEYS = 64
"""Keys a block of a split kernel takes at a time. Split s of S takes the steps s, s + S, s + 2 S, ...: which split a
key belongs to does not depend on the context, nor on the rows beside, and neither do the bits of a row."""

MAX_SPLITS = 128
"""Splits of the context at most: 256 dims and 16 rows of 24 heads then take 50.7 MB of partials."""

SLAB_PITCH = Q8_BLOCK + 4
"""Floats from one row of a Q8_0 block's dims to the next in LDS: 16 bytes apart in the banks, so that 8 fill them."""

RECORD_HEAD = 2
"""Floats before `out` in a partial record: tile_max and tile_sum."""

MAX_HEAD_DIM = 256


def ceil_div(a: int, b: int) -> int:
    """The number of groups of b that cover a. `ceil_div(129, 128)` is 2, `ceil_div(0, 128)` is 0."""
    return -(-a // b)


def tiles(ctx: int) -> int:
    """Tiles that cover `ctx` keys; at least one, so that a stride or a grid is never zero."""
    return max(1, ceil_div(ctx, TILE))


def covering(ctx: int) -> int:
    """Keys of what is made for contexts like this one: tiles by a power of two. 4097 keys: 8192."""
    return TILE << (tiles(ctx) - 1).bit_length()


def splits_for(multiprocessors: int, n_kv_heads: int, row_groups: int = 1) -> int:
    """Splits that fill a device once with a block for each (split, KV head, row group): 33 for 132, 4 and 1."""
    return min(MAX_SPLITS, max(1, multiprocessors // (n_kv_heads * row_groups)))


def kv_cache_shape(capacity: int, n_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the K or V cache, uint8. 4 KV heads of 256 dims take 4 * 8 * 34 = 1,088 bytes a position."""
    return (capacity, n_kv_heads, head_dim // Q8_BLOCK, Q8_BYTES)


def partials_shape(rows: int, n_heads: int, max_tiles: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the partials, float32. 16 rows, 24 heads, 256 tiles, 256 dims: 101.4 MB."""
    return (rows, n_heads, max_tiles, RECORD_HEAD + head_dim)
