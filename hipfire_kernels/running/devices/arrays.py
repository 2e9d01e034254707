"""Device memory and the arrays over it."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import numpy as np

from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.driver import Owner
from hipfire_kernels.running.devices.protocol import DTYPES, OfThisProcess, View, dtype_name, require_contiguous


class Buffer:
    """Device memory, freed when nothing refers to it any more, or by `free`."""

    def __init__(self, device: Owner, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        device.driver.activate(device.index)
        try:
            self.pointer = device.driver.malloc(max(1, nbytes))
        except DeviceError as error:
            raise DeviceError(f"{nbytes:,} bytes on {device.name}: {error}") from error

    def free(self) -> None:
        """Give the memory back now. Arrays over it are refused from here on."""
        if self.pointer:
            pointer, self.pointer = self.pointer, 0
            self.device.driver.activate(self.device.index)
            self.device.driver.free(pointer)

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):  # the context may be gone or poisoned; its owner has been told
                self.free()


class DeviceArray(OfThisProcess):
    """A C-contiguous array in device memory. Speaks `__cuda_array_interface__` and DLPack; `device.to_host` reads it.

    Attributes:
        view: what a launch needs to know of it; the same object as long as the array lives.
    """

    send_instead = "send device.to_host(array)"

    def __init__(self, buffer: Buffer, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.buffer, self.offset, self.shape, self.dtype = buffer, offset, shape, dtype
        self.view = View(buffer.pointer + offset, shape, dtype_name(dtype), True)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{list(self.shape)} on {self.buffer.device.name}>"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def pointer(self) -> int:
        """Device address. InputError once the buffer has been freed."""
        if not self.buffer.pointer:
            raise InputError(f"{self!r} has been freed")
        return self.buffer.pointer + self.offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self.pointer, False),
            "shape": self.shape,
            "typestr": DTYPES.get(self.view.dtype, self.dtype).str,  # of bf16 its bits: the interface has no such type
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self.buffer.device
        return (device.driver.dlpack_device, device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """An unversioned capsule. The consumer's stream is made to wait for what the device's own stream has queued.

        Raises:
            BufferError: a copy is asked for, or another device.
        """
        device = self.buffer.device
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"{self!r} is handed out where it is, without a copy")
        if stream not in (None, -1):
            device.order_after(device.default_stream, device.stream_handle(stream))
        return dlpack.export(self, self.pointer, self.shape, self.dtype, self.__dlpack_device__())


def read_interface(name: str, interface: Any) -> tuple[View, Any]:
    """What a `__cuda_array_interface__` says: the array, and the stream to wait for, None for none.

    Raises:
        InputError: it cannot be read, has a mask, or is not C-contiguous.
    """
    try:
        pointer, read_only = interface["data"]
        dtype, shape = np.dtype(interface["typestr"]), tuple(int(extent) for extent in interface["shape"])
        strides, mask, stream = (interface.get(key) for key in ("strides", "mask", "stream"))
        view = View(int(pointer or 0), shape, dtype_name(dtype), not read_only)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{name} has a __cuda_array_interface__ that cannot be read: {error!r}") from error
    if mask is not None:
        raise InputError(f"{name} has a mask; required: an array in which every element counts")
    require_contiguous(name, shape, strides, dtype.itemsize)
    return view, stream
