import pytest
from rowkernels import FAMILIES

import hipfire_kernels as hk


@pytest.mark.parametrize("variant", [v for family in FAMILIES for v in family.variants()], ids=lambda v: v.name)
def test_parity(variant):
    hk.parity(variant, quick=True)
