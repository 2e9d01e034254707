"""The CPU as a device: kernels run as fibers in a shared object (`templates/dialect_host.h`), blocks on all cores.

Arrays are numpy arrays. The OS threads of a pool take ranges of blocks; cffi releases the GIL around each. What a
kernel computes does not depend on how blocks are spread.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cffi
import numpy as np
import numpy.typing as npt

from ..archs import arch
from ..errors import DeadlockError, DeviceError, InputError
from . import ALIGNMENT, KernelArgs, Launch, View, dlpack, dtype_name

if TYPE_CHECKING:
    from ..builder import Artifact

_CDEF = """
typedef struct { unsigned grid[3], threads, lds_bytes, permute; unsigned long long seed; } hk_launch;
typedef struct { unsigned block[3], thread; int line, other_line; } hk_report;
int hk_run(const hk_launch*, void**, unsigned long long first, unsigned long long last, hk_report*);
"""
_NO_MEMORY, _WAVE_LINES, _BARRIER_LINES, _DEADLOCK, _LDS_OVERRUN = 1, 2, 3, 4, 5


_FFI: Any = cffi.FFI()
_FFI.cdef(_CDEF)
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
_POOL = ThreadPoolExecutor(max_workers=_CORES, thread_name_prefix="hipfire-block")  # its threads start when needed


def _host_array(name: str, array: Any) -> npt.NDArray[Any]:
    """A DLPack producer's memory as numpy, without a copy. The producer keeps it alive."""
    if not hasattr(array, "__dlpack_device__"):
        raise InputError(
            f"{name} is a {type(array).__name__}; the host device takes numpy arrays and CPU DLPack producers"
        )
    kind = int(array.__dlpack_device__()[0])
    if kind not in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
        raise InputError(f"{name} is on DLPack device type {kind}; the host device takes arrays in host memory")
    return dlpack.as_numpy(name, dlpack.peek(array.__dlpack__()))


@dataclass(frozen=True)
class HostKernel:
    """A loaded shared object and the artifact it came from."""

    artifact: Artifact
    shared_object: Any


class HostDevice:
    """The CPU.

    Args:
        thread_order: None runs the threads of a block in index order. A seed permutes them between switch points:
            a result that changes with the seed is a race.
    """

    name = "host"
    toolchain: str | None = None
    capturing = False

    def __init__(self, thread_order: int | None = None) -> None:
        self.arch = arch("host")
        self.thread_order = thread_order
        self._loaded: dict[str, HostKernel] = {}

    def __repr__(self) -> str:
        return "<HostDevice>" if self.thread_order is None else f"<HostDevice thread_order={self.thread_order}>"

    def view(self, name: str, array: Any) -> View:
        """See `Device.view`."""
        if not isinstance(array, np.ndarray):
            array = _host_array(name, array)
        dtype = dtype_name(array.dtype)
        if not array.flags.c_contiguous:
            raise InputError(
                f"{name} has strides {array.strides} for shape {array.shape}; required: C-contiguous. "
                "Pass numpy.ascontiguousarray(...) of it"
            )
        pointer = int(array.ctypes.data)
        alignment = ALIGNMENT.get(dtype, 1)
        if pointer % alignment and array.size:
            raise InputError(f"{name} is at an address that is not a multiple of {alignment}, which {dtype} needs")
        return View(pointer, array.shape, dtype, bool(array.flags.writeable))

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `Device.empty`."""
        return np.empty(tuple(shape), dtype)

    def section(self, array: Any, start: int, shape: Sequence[int]) -> npt.NDArray[Any]:
        """See `Device.section`."""
        part: npt.NDArray[Any] = array[start : start + int(np.prod(shape, dtype=np.int64))].reshape(tuple(shape))
        return part

    def to_device(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `Device.to_device`."""
        return array

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """See `Device.to_host`."""
        return array if isinstance(array, np.ndarray) else _host_array("array", array)

    def load(self, artifact: Artifact) -> HostKernel:
        """See `Device.load`. The shared object goes through a temporary file, removed once it is mapped."""
        kernel = self._loaded.get(artifact.key)
        if kernel is None:
            with tempfile.NamedTemporaryFile(suffix=".so") as file:
                file.write(artifact.code)
                file.flush()
                kernel = HostKernel(artifact, _FFI.dlopen(file.name))
            self._loaded[artifact.key] = kernel
        return kernel

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """See `Device.launch`. Returns when all blocks have run."""
        if stream is not None:
            raise InputError(f"stream is {stream!r}; the host device has no streams, pass None")
        for one in launches:
            self._launch(one)

    def _launch(self, one: Launch) -> None:
        kernel: HostKernel = one.kernel
        launch = self._describe(kernel, one.grid, one.threads)
        total = one.grid[0] * one.grid[1] * one.grid[2]
        parts = min(total, 4 * _CORES) if _CORES > 1 else 1
        edges = [total * i // parts for i in range(parts + 1)] if parts else []
        run = functools.partial(_run, kernel, launch, one.args)
        if parts <= 1:
            failures = [run(a, b) for a, b in itertools.pairwise(edges)]
        else:
            futures: list[Future[Failure | None]] = [_POOL.submit(run, a, b) for a, b in itertools.pairwise(edges)]
            failures = [future.result() for future in futures]
        for failure in failures:
            if failure is not None:
                raise failure.exception(kernel.artifact)

    def _describe(self, kernel: HostKernel, grid: tuple[int, int, int], block: int) -> Any:
        return _FFI.new(
            "hk_launch*",
            {
                "grid": grid,
                "threads": block,
                "lds_bytes": kernel.artifact.resources.lds_bytes,
                "permute": self.thread_order is not None,
                "seed": self.thread_order or 0,
            },
        )


@dataclass(frozen=True)
class Failure:
    """What the fiber runtime reported: a code, the block and thread, and the source lines concerned."""

    code: int
    block: tuple[int, int, int]
    thread: int
    line: int
    other_line: int

    def exception(self, artifact: Artifact) -> DeviceError:
        """The error to raise, with the text of the source lines."""

        def quoted(line: int) -> str:
            lines = artifact.source.splitlines()
            return f"line {line}: {lines[line - 1].strip()!r}" if 0 < line <= len(lines) else "its end"

        at = f"{artifact.entry}, block {self.block}, thread {self.thread}"
        here, there = quoted(self.line), quoted(self.other_line)
        if self.code == _NO_MEMORY:
            return DeviceError(f"{artifact.entry}: no memory for the stacks of a block's threads")
        if self.code == _WAVE_LINES:
            return DeadlockError(f"{at}: lanes of one wave are in different wave operations: {here} and {there}")
        if self.code == _BARRIER_LINES:
            return DeadlockError(f"{at}: threads of one block are at different barriers: {here} and {there}")
        if self.code == _DEADLOCK:
            return DeadlockError(
                f"{at} waits at {here}, and no other thread can run: the others are at {there}. "
                "A barrier or wave operation is reached by some threads only"
            )
        if self.code == _LDS_OVERRUN:
            return DeviceError(
                f"{artifact.entry}, block {self.block}: wrote {self.line} bytes behind its "
                f"{artifact.resources.lds_bytes} bytes of LDS"
            )
        return DeviceError(f"{at}: the host runtime returned {self.code}")


def _run(kernel: HostKernel, launch: Any, args: KernelArgs, first: int, last: int) -> Failure | None:
    report = _FFI.new("hk_report*")
    pointers = _FFI.cast("void**", args.address)
    code = kernel.shared_object.hk_run(launch, pointers, first, last, report)
    if code == 0:
        return None
    where = (report.block[0], report.block[1], report.block[2])
    return Failure(code, where, report.thread, report.line, report.other_line)
