"""Every shipped variant through a real hiprtc, where this machine has one: as good as the offline clang's build."""

from __future__ import annotations

import pytest

from hipfire_kernels import build, families
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.building.resources import read_args
from hipfire_kernels.building.toolchains.clang import ClangToolchain
from hipfire_kernels.building.toolchains.hiprtc import HiprtcToolchain

VARIANTS = [variant for family in families().values() for variant in family.variants()]


@pytest.mark.parametrize("name", ["gfx1100", "gfx1201"])
def test_every_variant_compiles(name: str) -> None:
    reason = HiprtcToolchain().available(arch(name))
    if reason is not None:
        pytest.skip(f"no hiprtc for {name}: {reason}")
    for variant in VARIANTS:
        made = build(variant, name, "hiprtc")
        found = made.resources
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0), variant.name
        assert (found.lds_bytes, found.wavefront) == (variant.lds_bytes(), 32), variant.name
        args = read_args(made.code, variant.entry)
        kinds = ["global_buffer" if isinstance(arg, Tensor) else "by_value" for arg in variant.args]
        assert [arg.kind for arg in args] == kinds, variant.name
        if ClangToolchain().available(arch(name)) is None:
            assert args == read_args(build(variant, name, "clang").code, variant.entry), variant.name
