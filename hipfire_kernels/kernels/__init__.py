"""The library's kernel declarations. With its template, each is the whole truth about one family.

To add a variant, add a value to `params`. To add a family, add a declaration to the file of its kind, a template of the
same name, and the family to the table here. A family of a package of your own needs nothing here: `registry.register`.
"""

from __future__ import annotations

from hipfire_kernels.authoring.registry import REGISTRY, families
from hipfire_kernels.kernels.cache import KV_WRITE
from hipfire_kernels.kernels.draft import DFLASH, DFLASH_M16, DFLASH_M32, DFLASH_N64
from hipfire_kernels.kernels.verify import PREFILL, REDUCE, ROWS, TILE_BATCHED, VERIFY_GQA, VERIFY_MMA

__all__ = ["LIBRARY", "families"]

LIBRARY = (
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
"""The families of the library, in the order `hfk list` shows them."""

for _family in LIBRARY:
    REGISTRY.add(_family, "hipfire_kernels")
