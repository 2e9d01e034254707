"""Arrays of other libraries in host memory; on a GPU, see standins/on_foreign.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from foreign_lab import BAD, GOOD, OFFSET, SHAPE, Described, Old, described

from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import Device

Array = np.ndarray[Any, Any]


@pytest.fixture
def memory() -> Array:
    """Float32 values of which SHAPE begin OFFSET bytes in."""
    return np.random.default_rng(0).standard_normal(200).astype(np.float32)


def at(memory: Array) -> tuple[int, Array]:
    """Address and values of the array in there."""
    first = OFFSET // 4
    return memory.ctypes.data + OFFSET, memory[first : first + 24].reshape(SHAPE)


@pytest.mark.parametrize("what", GOOD)
def test_what_is_said_is_what_is_read(what: str, memory: Array, host: Device) -> None:
    start, values = at(memory)
    said = GOOD[what]
    array = described(start, said, keep=memory)
    want = np.empty(said["shape"], np.float32) if "pointer" in said else values.reshape(said.get("shape", SHAPE))
    got = host.to_host(array)
    assert np.array_equal(got, want)
    assert got.shape == want.shape
    assert host.view("x", array).writable == (said.get("flags") != 1)
    if "pointer" not in said:
        assert host.view("x", array).pointer == start
    if said.get("kind") is not Old:
        assert array.asked[-1]["max_version"] == (1, 0)
        assert np.array_equal(np.from_dlpack(array), want)  # what numpy makes of the same struct


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_in_place_is_refused(what: str, memory: Array, host: Device) -> None:
    said, message = BAD[what]
    with pytest.raises(InputError, match=message):
        host.view("x", described(at(memory)[0], said, keep=memory))


def test_an_address_that_does_not_fit_the_dtype_is_refused_if_anything_is_there(memory: Array, host: Device) -> None:
    start = at(memory)[0] + 2
    with pytest.raises(InputError, match="x is at an address that is not a multiple of 4"):
        host.view("x", Described(start, SHAPE))
    assert host.view("x", Described(start, (0, 6))).shape == (0, 6)
    assert host.to_host(Described(memory.ctypes.data, ())).shape == ()


def test_big_endian_is_another_dtype(host: Device) -> None:
    assert host.view("x", np.zeros(SHAPE, ">f4")).dtype == ">f4"
