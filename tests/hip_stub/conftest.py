"""For the files here, which run in a child process with the stub as ROCm: see test_hip_device.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hip_lab import Stub

from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device


@pytest.fixture(autouse=True)
def stub() -> Iterator[Stub]:
    """The stub. A test that it has a complaint about has failed."""
    loaded = Stub()
    yield loaded
    gc.collect()
    assert loaded.complaints() == []


@pytest.fixture
def host() -> Device:
    return device("host")


@pytest.fixture
def hip0() -> GpuDevice:
    """A gfx1100."""
    return opened("hip:0")


@pytest.fixture
def hip1() -> GpuDevice:
    """A gfx1201."""
    return opened("hip:1")


def opened(name: str) -> GpuDevice:
    found = device(name)
    assert isinstance(found, GpuDevice)
    return found
