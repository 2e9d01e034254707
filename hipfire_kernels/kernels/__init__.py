"""The kernel declarations. With its template, each is the whole truth about one family.

To add a variant, add a value to `params`. To add a family, add a declaration to the file of its kind, a template of the
same name, and the family to the table here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hipfire_kernels.authoring.family import KernelFamily
from hipfire_kernels.kernels.cache import KV_WRITE
from hipfire_kernels.kernels.draft import DFLASH, DFLASH_M16, DFLASH_M32, DFLASH_N64
from hipfire_kernels.kernels.verify import PREFILL, REDUCE, ROWS, TILE_BATCHED, VERIFY_GQA, VERIFY_MMA

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
