"""Arrays and numbers of every dtype on a stand-in: packed, launched, captured, and handed to and taken from others."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from dtype_lab import DTYPES, HIGHEST, LOWEST, STORED, inputs, wanted
from on_foreign import Interface, Producer

import hipfire_kernels as hk
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.gpu import GpuDevice

EACH = pytest.mark.parametrize("name", list(STORED))


@pytest.mark.parametrize("numbers", [LOWEST, HIGHEST], ids=["lowest", "highest"])
@pytest.mark.parametrize("captured", [False, True])
def test_every_argument_arrives(numbers: dict[str, Any], captured: bool, gpu0: GpuDevice) -> None:
    there = {f"x_{name}": gpu0.to_device(inputs(name)) for name in STORED}
    given = {**there, **{f"s_{name}": number for name, number in numbers.items()}}
    if captured:
        stream = gpu0.stream()
        with gpu0.capture(stream) as graph:
            hk.launch(DTYPES.variant(), gpu0, stream=stream, **given)
        graph.launch(stream)
        stream.synchronize()
    else:
        hk.launch(DTYPES.variant(), gpu0, **given)
    for name in STORED:
        got = gpu0.to_host(there[f"x_{name}"])
        assert got.dtype == np.dtype(STORED[name])
        assert got.tobytes() == wanted(name, inputs(name), numbers[name]).tobytes(), name


@EACH
@pytest.mark.parametrize("kind", [Interface, Producer])
def test_foreign_arrays(kind: type[Any], name: str, gpu0: GpuDevice) -> None:
    array = gpu0.to_device(inputs(name))
    view = gpu0.view("x", kind(array))
    assert (view.dtype, view.shape, view.pointer) == (name, array.shape, array.pointer)
    assert gpu0.to_host(kind(array)).tobytes() == inputs(name).tobytes()


def test_bf16_is_said_where_it_can_be(gpu0: GpuDevice) -> None:
    """DLPack has the type; to readers of the CUDA array interface the bits are uint16."""
    array = gpu0.to_device(inputs("bf16"))
    assert array.__cuda_array_interface__["typestr"] == "<u2"
    capsule = array.__dlpack__()
    pointer = dlpack._capsule_pointer(capsule, b"dltensor")
    assert ctypes.cast(pointer, ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor.code == 4


@EACH
def test_an_address_within_an_element_is_refused(name: str, gpu0: GpuDevice) -> None:
    array, size = gpu0.to_device(inputs(name)), np.dtype(STORED[name]).itemsize
    if size > 1:
        with pytest.raises(
            InputError, match=f"x is at an address that is not a multiple of {size}, which {name} needs"
        ):
            gpu0.view("x", Interface(array, data=(array.pointer + size // 2, False)))
