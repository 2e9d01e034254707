"""The kernel declarations. With its template, each is the whole truth about one family.

To add a variant, add a value to `params`. To add a family, add a declaration to the file of its kind, a template of the
same name, and the family to the table here.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.errors import InputError
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


def _family_named(name: str) -> KernelFamily:
    return _FAMILIES[name]


def _variant_named(name: str, params: dict[str, Any]) -> Variant:
    return _FAMILIES[name].variant(**params)


def _by_name(family: KernelFamily) -> str:
    """What stands for a family in another process: its functions do not travel."""
    if _FAMILIES.get(family.name) is not family:
        raise InputError(
            f"{family!r} cannot be pickled: it is none of families(), where the other process would look for it by "
            "name; declare it in a module that both import"
        )
    return family.name


copyreg.pickle(KernelFamily, lambda family: (_family_named, (_by_name(family),)))
copyreg.pickle(Variant, lambda variant: (_variant_named, (_by_name(variant.family), dict(variant.params))))
