"""Every family on a device within the oracle's limits, and with the bits of the host device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from standin_lab import variants

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import parity
from hipfire_kernels.checking.oracle import oracle_of
from hipfire_kernels.checking.parity import Guarded, grid
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device

REDUCED = {
    "hip": {"rows": (1, 5, 8, 31), "contexts": (1, 127, 129, 300)},
    "cuda": {"rows": (5,), "contexts": (129,)},  # the kernels are the same host builds
}


@pytest.mark.parametrize("variant", variants(), ids=lambda v: v.entry)
def test_family(variant: Variant, gpu0: GpuDevice, host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray[Any, Any]] = []
    read = Guarded.read

    def recorded(self: Guarded) -> np.ndarray[Any, Any]:
        seen.append(read(self))
        return seen[-1]

    monkeypatch.setattr(parity.Guarded, "read", recorded)
    monkeypatch.setattr(host, "multiprocessors", gpu0.multiprocessors)  # as many splits, or the sums have other bits
    for case in grid(variant, **REDUCED[gpu0.driver.vendor]):
        outputs = []
        for where in (gpu0, host):
            seen.clear()
            result = oracle_of(variant).check(variant, case, where)  # of the host itself, without its memory check
            assert result.ok, result.describe()
            outputs.append([array.tobytes() for array in seen])
        assert outputs[0] == outputs[1], case.describe()
        assert outputs[0]
