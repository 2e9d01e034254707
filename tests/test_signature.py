"""The declared argument list, against what the compilers made of it."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from hipfire_kernels import build, families
from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.resources import read_args
from hipfire_kernels.running.devices.protocol import DTYPES
from hipfire_kernels.running.scalars import CTYPES

VARIANTS = [next(family.variants()) for family in families().values()]
VARIANTS += [
    families()["attention_flash_q8_0_tile_batched"].variant(head_dim=256, mask=mask) for mask in ("window", "tree")
]
VARIANTS += [families()["kv_cache_write_q8_0_batched"].variant(pair=True)]
VARIANTS += [families()["attention_dflash_f32"].variant(head_dim=128, sliding=True)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_declared_and_compiled_arguments_agree(variant: Variant, arch: str) -> None:
    compiled = read_args(build(variant, arch).code, variant.entry)
    assert len(compiled) == len(variant.args)
    offset = 0
    for declared, found in zip(variant.args, compiled, strict=True):
        size = 8 if isinstance(declared, Tensor) else ctypes.sizeof(CTYPES[declared.dtype])
        offset = -(-offset // size) * size
        assert (found.offset, found.size) == (offset, size), declared.name
        assert found.kind == ("global_buffer" if isinstance(declared, Tensor) else "by_value")
        offset += size


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_declared_and_compiled_lds_agree(variant: Variant) -> None:
    assert build(variant, "gfx1100").resources.lds_bytes == variant.lds_bytes()


def test_every_variant_builds_for_every_gfx_arch_without_spills() -> None:
    """The tuned shapes on all archs, of the split kernels one group; the whole product is `hfk build --all`."""
    for family in families().values():
        for variant in family.variants():
            params = dict(variant.params)
            if params.get("head_dim", 128) not in (128, 256) or params.get("group", 6) != 6:
                continue
            for arch in filter(variant.fits, ("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201")):
                r = build(variant, arch).resources
                assert (r.vgpr_spills, r.sgpr_spills, r.scratch_bytes) == (0, 0, 0), (variant.name, arch)
                assert r.wavefront == 32


@pytest.mark.parametrize(("rows", "limit"), [(4, 106), (8, 186)])
def test_registers_stay_within_upstreams(rows: int, limit: int) -> None:
    variant = families()["attention_flash_q8_0_rows"].variant(rows=rows, head_dim=256)
    vgprs = build(variant, "gfx1100").resources.vgprs
    assert vgprs is not None
    assert vgprs <= limit


@pytest.mark.parametrize("rows", [2, 16])
def test_another_rows_value_is_one_number(rows: int) -> None:
    from hipfire_kernels.checking.oracle import check
    from hipfire_kernels.checking.parity import grid
    from hipfire_kernels.running.devices import device

    declared = families()["attention_flash_q8_0_rows"]
    wider = dataclasses.replace(declared, params={**declared.params, "rows": (rows,)})
    for variant in wider.variants():
        resources = build(variant, "gfx1100").resources
        assert (resources.vgpr_spills, resources.scratch_bytes) == (0, 0)
        for case in grid(variant, rows=(1, 5, 17), contexts=(2, 129, 300)):
            result = check(variant, case, device("host"))
            assert result.ok, result.describe()


def test_every_declared_dtype_is_known() -> None:
    for family in families().values():
        for variant in family.variants():
            for arg in variant.args:
                assert arg.dtype in (DTYPES if isinstance(arg, Tensor) else CTYPES)
