"""Devices: where kernels run. Each allocates, copies, loads an artifact and launches it."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.protocol import Device

GPU_VENDORS = ("hip", "cuda")
"""Vendors, in the order `auto` tries them. The module of that name has `driver()` and `open_device(index)`."""


HOSTS = ("host", "host+flush", "host+undefined", "host+address")
ISA = "isa"
"""What the names of the interpreter's devices begin with."""


def device(name: str = "auto") -> Device:
    """A device by name: `host`, `hip:N`, `cuda:N`, or `auto`: the first GPU that opens, else the host.

    `host+flush` is the host with a matrix operation that reads subnormal f16 operands as zero. `host+undefined` and
    `host+address` are the host with kernels under a sanitizer: see `toolchains.sanitized`. `isa:gfx1201`, or another
    gfx arch, interprets the machine code for it, and `isa:gfx1201+flush` the same with a matrix operation of that kind:
    see `devices.isa`.

    The same name gives the same device. A device that could not be opened is tried again the next time.

    A GPU that was opened cannot be used in a process that is forked afterwards; there, "auto" is still that GPU, and
    its first use says so.

    Raises:
        InputError: the name is none of these.
        DeviceError: there is no such device here, or its driver is missing; the message says which.
    """
    if not isinstance(name, str):
        raise InputError(f"device is {name!r}; required: host, hip:N, cuda:N or auto")
    if name == "auto":
        name = next(_openable())
    vendor, _, index = name.partition(":")
    if vendor in GPU_VENDORS and index.isdecimal():
        name = f"{vendor}:{int(index)}"
    elif name not in HOSTS and name not in _interpreted(vendor):
        raise InputError(f"device {name!r} is not known; required: host, hip:N, cuda:N or auto, or isa:ARCH")
    with _opening:  # arrays name their device object: there must not be two of one
        if name not in _opened:
            _opened[name] = _open(name)
        return _opened[name]


def resolve(given: Device | str) -> Device:
    """A device that was given as one, or by its name.

    Raises:
        InputError, DeviceError: see `device`.
    """
    if isinstance(given, str):
        return device(given)
    if not hasattr(given, "memory_bytes"):
        raise InputError(f"device is {given!r}; required: one of hipfire_kernels.device, or its name")
    return given


_opening = threading.Lock()
_opened: dict[str, Device] = {}


def _in_forked_child() -> None:
    global _opening
    _opening = threading.Lock()  # a thread that is gone may have held it


os.register_at_fork(after_in_child=_in_forked_child)


def arch_of(name: str) -> str:
    """The arch of a device that is no card, by the device's name alone."""
    return name.partition(":")[2].partition("+")[0] if name.startswith(f"{ISA}:") else "host"


def _interpreted(vendor: str) -> tuple[str, ...]:
    """Names of the interpreter's devices, asked for where one may be meant: it is not loaded otherwise."""
    found: tuple[str, ...] = _module(ISA).names() if vendor == ISA else ()
    return found


def _open(name: str) -> Device:
    vendor, _, index = name.partition(":")
    if vendor == ISA:
        interpreted: Device = _module(ISA).open_device(name)
        return interpreted
    if name in HOSTS:
        from hipfire_kernels.running.devices.host import HostDevice

        kind = name.partition("+")[2]
        return HostDevice(flush_f16=True) if kind == "flush" else HostDevice(sanitizer=kind or None)
    opened: Device = _module(vendor).open_device(int(index))
    return opened


def devices() -> tuple[str, ...]:
    """Names of the devices that open on this machine, GPUs first. Opens them, and never raises."""
    return tuple(_openable())


def _openable() -> Iterator[str]:
    for vendor in GPU_VENDORS:
        for index in range(_count(vendor)):
            with contextlib.suppress(DeviceError):
                yield device(f"{vendor}:{index}").name
    yield "host"


def _count(vendor: str) -> int:
    try:
        return int(_module(vendor).driver().count())
    except DeviceError:
        return 0


def _module(vendor: str) -> Any:
    return importlib.import_module(f".{vendor}", __name__)


def device_of(array: Any) -> Device:
    """The device an array lives on: numpy and CPU DLPack on the host, the rest by its own word or its pointer.

    Raises:
        InputError: not an array of any device that can be opened here.
    """
    if isinstance(array, np.ndarray):
        return device("host")
    buffer = getattr(array, "buffer", None)
    if buffer is not None and hasattr(buffer, "device"):
        owner: Device = buffer.device
        return owner
    if hasattr(array, "__dlpack_device__"):
        kind, index = (int(part) for part in array.__dlpack_device__())
        vendor = {dlpack.CUDA: "cuda", dlpack.ROCM: "hip"}.get(kind)
        if vendor is not None:
            return device(f"{vendor}:{index}")
        if kind in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
            return device("host")
    raise InputError(
        f"the device of a {type(array).__name__} cannot be found; pass device=, or a numpy array or a DLPack producer"
    )
