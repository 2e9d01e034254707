"""Everything that compiles, ahead of what is limited in time."""

from __future__ import annotations

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.running.attention import reducer
from hipfire_kernels.running.binding import kernel
from hipfire_kernels.running.devices.protocol import Device


def prepare(variant: Variant, device: Device) -> None:
    """Build and load what a call of a variant launches: afterwards the call itself compiles nothing.

    Raises:
        ToolchainError: it cannot be built for the device's arch.
        DeviceError: it cannot be loaded.
    """
    for one in (variant, reducer(variant)):
        if one is not None:
            kernel(one, device)
