"""Devices: where kernels run. Each allocates, copies, loads an artifact and launches it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import Arch
from hipfire_kernels.errors import DeviceError, InputError

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact


@dataclass(frozen=True)
class View:
    """What a kernel needs to know of an array: address, shape, dtype name, and whether it may be written."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool


class KernelArgs:
    """Kernel arguments in signature order, and the array of pointers to them that every launch API takes.

    Attributes:
        keeps: memory that must live as long as a launch with these arguments may run, in a captured graph too.
    """

    keeps: Any = None

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self.address = ctypes.addressof(self.pointers)


class Launch(NamedTuple):
    """One launch, with nothing left to decide: what `Device.load` gave, blocks, threads of a block, arguments.

    `early`: it may begin while the launch ahead of it in the stream still runs, for which the kernel itself waits.
    Devices that cannot do that begin it afterwards.
    """

    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    args: KernelArgs
    early: bool = False


class Device(Protocol):
    """One place to run kernels. Arrays are whatever the device hands out; numpy arrays on the host.

    Attributes:
        name: `host`, `hip:0`, `cuda:0`.
        arch: the row of the arch table that kernels are built for.
        toolchain: what builds for it; None for the first that can.
        multiprocessors: what blocks are spread over, by the driver's count.
    """

    name: str
    arch: Arch
    toolchain: str | None
    multiprocessors: int

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured, so that what is launched must stay right as the context grows."""

    def __hash__(self) -> int:
        """Devices are equal where they are the same object."""

    def view(self, name: str, array: Any) -> View:
        """Address, shape and dtype of an array that lives on this device.

        Raises:
            InputError: not an array of this device, not C-contiguous, or misaligned for its dtype.
        """

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A C-contiguous array with undefined contents."""

    def section(self, array: Any, start: int, shape: Sequence[int]) -> Any:
        """A C-contiguous array over a part of a one-dimensional one, from element `start`. No copy."""

    def to_device(self, array: npt.NDArray[Any]) -> Any:
        """A copy of a numpy array, there for any stream; the array itself where it already lives on this device."""

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """A numpy array with the contents of an array of this device."""

    def load(self, artifact: Artifact) -> Any:
        """Make an artifact launchable. The same artifact is loaded once."""

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """Launch loaded kernels, one behind the other. An error of a launch is raised here, not at a later call.

        Raises:
            DeviceError: a launch failed.
            InputError: the stream is not one of this device.
        """


DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "u8": np.dtype(np.uint8),
}
"""Declared dtype to numpy's."""

ALIGNMENT = {"f32": 4, "f16": 16, "i32": 4, "u8": 2}
"""Bytes an argument's address must be a multiple of. u8 is the Q8_0 cache, whose scales are loaded 2 bytes wide; f16
are loaded eight at a time."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    """`f32`, `f16`, `i32` or `u8`, or numpy's own name where no kernel takes the dtype."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


GPU_VENDORS = ("hip", "cuda")
"""Vendors, in the order `auto` tries them. The module of that name has `driver()` and `open_device(index)`."""


HOSTS = ("host", "host+undefined", "host+address")


def device(name: str = "auto") -> Device:
    """A device by name: `host`, `hip:N`, `cuda:N`, or `auto`: the first GPU that opens, else the host.

    `host+undefined` and `host+address` are the host with kernels under a sanitizer: see `toolchains.sanitized`.

    The same name gives the same device. A device that could not be opened is tried again the next time.

    Raises:
        InputError: the name is none of these.
        DeviceError: there is no such device here, or its driver is missing; the message says which.
    """
    if name == "auto":
        name = next(_openable())
    vendor, _, index = name.partition(":")
    if vendor in GPU_VENDORS and index.isdecimal():
        name = f"{vendor}:{int(index)}"
    elif name not in HOSTS:
        raise InputError(f"device {name!r} is not known; required: host, hip:N, cuda:N or auto")
    with _opening:  # arrays name their device object: there must not be two of one
        if name not in _opened:
            _opened[name] = _open(name)
        return _opened[name]


_opening = threading.Lock()
_opened: dict[str, Device] = {}


def _open(name: str) -> Device:
    vendor, _, index = name.partition(":")
    if name in HOSTS:
        from hipfire_kernels.running.devices.host import HostDevice

        return HostDevice(sanitizer=name.partition("+")[2] or None)
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
        from hipfire_kernels.running.devices import dlpack

        kind, index = (int(part) for part in array.__dlpack_device__())
        vendor = {dlpack.CUDA: "cuda", dlpack.ROCM: "hip"}.get(kind)
        if vendor is not None:
            return device(f"{vendor}:{index}")
        if kind in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
            return device("host")
    raise InputError(
        f"the device of a {type(array).__name__} cannot be found; pass device=, or a numpy array or a DLPack producer"
    )
