"""For the files here, which run in a child process with a stand-in as the driver: see test_standins.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from standin_lab import StandIn

from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device

_LOADED = StandIn()


@pytest.fixture(autouse=True)
def stub() -> Iterator[StandIn]:
    """The stand-in. A test that it has a complaint about has failed."""
    yield _LOADED
    gc.collect()
    assert _LOADED.complaints() == []


@pytest.fixture
def host() -> Device:
    return device("host")


@pytest.fixture
def gpu0() -> GpuDevice:
    """A gfx1100, or an sm_90."""
    return opened(0)


@pytest.fixture
def gpu1() -> GpuDevice:
    """A gfx1201, or an sm_90."""
    return opened(1)


def opened(index: int) -> GpuDevice:
    """A device of the stand-in."""
    found = device(_LOADED.name(index))
    assert isinstance(found, GpuDevice)
    return found
