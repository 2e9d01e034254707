"""What every device does, and what passes between a device and a launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import Arch
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact


class View(NamedTuple):
    """What a kernel needs to know of an array: address, shape, dtype name, and whether it may be written."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the address on, of a dtype that kernels take."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Argument:
    """An array argument as a launch has it: which of the arguments, and what is declared of it."""

    slot: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    writes: bool
    align: int

    @property
    def nbytes(self) -> int:
        """Bytes from its address on."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class KernelArgs:
    """Kernel arguments in signature order, and the array of pointers to them that every launch API takes.

    Attributes:
        keeps: memory that must live as long as a launch with these arguments may run, in a captured graph too.
    """

    keeps: Any = None

    def __init__(self, values: list[Any], arrays: tuple[Argument, ...] | None = None) -> None:
        self.values = values
        self._arrays = arrays
        self.pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self.address = ctypes.addressof(self.pointers)

    def described(self) -> tuple[Argument, ...]:
        """The array arguments.

        Raises:
            InputError: whoever packed the arguments has not said; `binding.bind` does.
        """
        if self._arrays is None:
            raise InputError("these arguments are packed without their declaration; bind them to check their launch")
        return self._arrays


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


class OfThisProcess:
    """What cannot be sent to another process: it holds memory, handles or threads of this one.

    Attributes:
        send_instead: what the error that pickle gets says about that.
    """

    send_instead = ""

    def __reduce__(self) -> NoReturn:
        raise InputError(f"{self!r} cannot be pickled: it belongs to this process; {self.send_instead}")


class Device(Protocol):
    """One place to run kernels. Arrays are whatever the device hands out; numpy arrays on the host.

    Attributes:
        name: `host`, `hip:0`, `cuda:0`.
        arch: the row of the arch table that kernels are built for.
        toolchain: what builds for it; None for the first that can.
        multiprocessors: what blocks are spread over, by the driver's count.
        memory_bytes: all of its memory, whoever uses it now.
    """

    name: str
    arch: Arch
    toolchain: str | None
    multiprocessors: int
    memory_bytes: int

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured, so that what is launched must stay right as the context grows."""

    def __hash__(self) -> int:
        """Devices are equal where they are the same object."""

    def checking(self, *, required: bool = False) -> Device:
        """This device with a memory check around every launch; itself where there is none.

        Raises:
            InputError: `required`, and there is none; with the reason.
        """

    def view(self, name: str, array: Any) -> View:
        """Address, shape and dtype of an array that lives on this device.

        Raises:
            InputError: not an array of this device, not C-contiguous, or misaligned for its dtype.
        """

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """A C-contiguous array with undefined contents.

        Raises:
            DeviceError: the memory is not there.
        """

    def section(self, array: Any, start: int, shape: Sequence[int]) -> Any:
        """A C-contiguous array over a part of a one-dimensional one, from element `start`. No copy."""

    def to_device(self, array: npt.NDArray[Any]) -> Any:
        """A copy of a numpy array, there for any stream; the array itself where it already lives on this device."""

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """A numpy array with the contents of an array of this device."""

    def stream_handle(self, stream: Any) -> int:
        """What the driver calls a stream of this device, or for None its default stream.

        Raises:
            InputError: the stream is not one of this device.
        """

    def load(self, artifact: Artifact) -> Any:
        """Make an artifact launchable. The same artifact is loaded once."""

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """Launch loaded kernels, one behind the other. An error of a launch is raised here, not at a later call.

        Raises:
            DeviceError: a launch failed.
            InputError: the stream is not one of this device.
        """


@runtime_checkable
class Ordered(Protocol):
    """A device whose threads of a block run in an order that can be drawn anew.

    Attributes:
        thread_order: a seed for it; None for the usual one.
    """

    thread_order: int | None


DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "i64": np.dtype(np.int64),
}
"""Declared dtype to numpy's. numpy has no bf16: uint16, which is no dtype of a kernel, stands for its bits."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The declared dtype, or numpy's own name where no kernel takes it. A `bfloat16` that somebody registered with
    numpy, such as that of ml_dtypes, is bf16."""
    name = _NAMES.get(dtype)
    if name is None:
        name = "bf16" if dtype.name == "bfloat16" else str(dtype)
    return name


def require_aligned(name: str, view: View) -> None:
    """Refuse an address at which no element may lie. What a kernel needs beyond that is for `binding` to ask."""
    known = DTYPES.get(view.dtype)
    if known is not None and view.pointer % known.itemsize and math.prod(view.shape):
        raise InputError(
            f"{name} is at an address that is not a multiple of {known.itemsize}, which {view.dtype} needs"
        )


def require_contiguous(name: str, shape: tuple[int, ...], strides: Sequence[int] | None, unit: int) -> None:
    """Refuse an array that is not C-contiguous. Strides are None if its maker says that it is; `unit` is an element's.

    Strides mean nothing along an extent of 1, nor in an array without elements.
    """
    if strides is None or 0 in shape:
        return
    expected = unit
    legal = len(strides) == len(shape)
    for extent, stride in zip(reversed(shape), reversed(strides), strict=False):
        legal &= extent == 1 or stride == expected
        expected *= extent
    if not legal:
        raise InputError(f"{name} has strides {tuple(strides)} for shape {shape}; required: C-contiguous")
