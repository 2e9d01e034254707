"""The CPU as a device: kernels run as fibers in a shared object (`templates/dialect_host.h`), blocks on all cores.

Arrays are numpy arrays. The OS threads of a pool take ranges of blocks; cffi releases the GIL around each. What a
kernel computes does not depend on how blocks are spread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi
import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.places import Place, Places
from hipfire_kernels.building import scratch
from hipfire_kernels.building.toolchains import sanitized
from hipfire_kernels.errors import DeadlockError, DeviceError, InputError, UndefinedBehaviour
from hipfire_kernels.running.devices import dlpack, memory
from hipfire_kernels.running.devices.arena import STACK_BYTES, arena
from hipfire_kernels.running.devices.protocol import (
    KernelArgs,
    Launch,
    OfThisProcess,
    View,
    dtype_name,
    require_aligned,
    require_contiguous,
)

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact

_CDEF = """
typedef struct { unsigned grid[3], threads, lds_bytes, permute; unsigned long long seed; } hk_launch;
typedef struct { void* workspace; char* stacks; unsigned long stack_bytes, stack_stride; } hk_arena;
typedef struct { unsigned block[3], thread; int line, other_line; const char *file, *other_file; } hk_report;
extern unsigned long hk_workspace_bytes;
int hk_run(const hk_launch*, void**, unsigned long long first, unsigned long long last, const hk_arena*, hk_report*);
"""
_NO_ARENA, _WAVE_LINES, _BARRIER_LINES, _DEADLOCK, _LDS_OVERRUN = -1, 1, 2, 3, 4  # the first is not hk_run's
_LANES_DIFFER, _MISALIGNED = 20, 21


_FFI: Any = cffi.FFI()
_FFI.cdef(_CDEF)
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
# With the stacks of 384 threads each, 64 workers take 49,000 of the 65,530 mappings that Linux grants a process.
_WORKERS = min(_CORES, 64)


def _pool() -> ThreadPoolExecutor:
    """Its threads start when they are needed."""
    return ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="hipfire-block")


_POOL = _pool()


def _in_forked_child() -> None:
    global _POOL
    _POOL = _pool()  # the threads of the other one stayed in the parent


os.register_at_fork(after_in_child=_in_forked_child)


def _host_array(name: str, array: Any) -> npt.NDArray[Any]:
    """A DLPack producer's memory as numpy, without a copy. The producer keeps it alive."""
    if not hasattr(array, "__dlpack_device__"):
        raise InputError(
            f"{name} is a {type(array).__name__}; the host device takes numpy arrays and CPU DLPack producers"
        )
    kind = int(array.__dlpack_device__()[0])
    if kind not in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
        raise InputError(f"{name} is on DLPack device type {kind}; the host device takes arrays in host memory")
    found = dlpack.peek(name, array)
    require_contiguous(name, found.shape, found.strides, 1)
    return dlpack.as_numpy(found)


@dataclass(frozen=True)
class HostKernel:
    """A loaded shared object, the artifact it came from, and the bytes of workspace that its blocks run in."""

    artifact: Artifact
    shared_object: Any
    workspace_bytes: int


class HostDevice(OfThisProcess):
    """The CPU.

    Args:
        thread_order: None runs the threads of a block in index order. A seed permutes them between switch points:
            a result that changes with the seed is a race.
        sanitizer: `undefined` or `address`: run kernels compiled with its checks; see `toolchains.sanitized`.
    """

    multiprocessors = 8  # whatever the cores: on another machine a call must not come out with other bits
    capturing = False
    send_instead = "send its name, and call hipfire_kernels.device(name) there"

    def __init__(self, thread_order: int | None = None, sanitizer: str | None = None) -> None:
        self.arch = arch("host")
        self.name = "host" if sanitizer is None else f"host+{sanitizer}"
        self.toolchain: str | None = None if sanitizer is None else self.name
        self._sanitizer = sanitizer
        self._kept: list[contextlib.ExitStack] = []
        if sanitizer == sanitized.ADDRESS:
            sanitized.require_loaded(self.arch)
        self.thread_order = thread_order
        self.memory_bytes = memory.total()
        self._loaded: dict[str, HostKernel] = {}

    def __repr__(self) -> str:
        order = "" if self.thread_order is None else f" thread_order={self.thread_order}"
        return f"<HostDevice {self.name}{order}>"

    def view(self, name: str, array: Any) -> View:
        """See `Device.view`."""
        if not isinstance(array, np.ndarray):
            array = _host_array(name, array)
        if not array.flags.c_contiguous:
            raise InputError(
                f"{name} has strides {array.strides} for shape {array.shape}; required: C-contiguous. "
                "Pass numpy.ascontiguousarray(...) of it"
            )
        found = View(int(array.ctypes.data), array.shape, dtype_name(array.dtype), bool(array.flags.writeable))
        require_aligned(name, found)
        return found

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `Device.empty`. What is larger than the memory that is left is refused: Linux hands out any amount, and
        ends the process that touches it."""
        extents, kind = tuple(int(extent) for extent in shape), np.dtype(dtype)
        nbytes = math.prod(extents) * kind.itemsize
        if nbytes >= memory.WORTH_ASKING and nbytes > (left := memory.available()):
            raise DeviceError(f"{nbytes:,} bytes are not there for {self.name}: {left:,} are left. {memory.REMEDY}")
        try:
            return np.empty(extents, kind)
        except MemoryError as error:
            raise DeviceError(f"{nbytes:,} bytes are not there for {self.name}: {error}. {memory.REMEDY}") from None

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

    def stream_handle(self, stream: Any) -> int:
        """See `Device.stream_handle`. There is no stream but the default one."""
        if stream is not None:
            raise InputError(f"stream is {stream!r}; the host device has no streams, pass None")
        return 0

    def load(self, artifact: Artifact) -> HostKernel:
        """See `Device.load`."""
        kernel = self._loaded.get(artifact.key)
        if kernel is None:
            mapped = functools.partial(self._mapped, artifact)
            found = scratch.somewhere("loading kernels", mapped, "is writable and not mounted noexec", DeviceError)
            kernel = self._loaded[artifact.key] = _loaded(artifact, found)
        return kernel

    def _mapped(self, artifact: Artifact, place: Path) -> Any:
        """The shared object, through a temporary file in a folder, which is removed once it is mapped."""
        own = scratch.prefix(os.getpid())
        with contextlib.ExitStack() as files:
            file = files.enter_context(tempfile.NamedTemporaryFile(prefix=own, suffix=".so", dir=place))
            file.write(artifact.code)
            file.flush()
            shared_object = _FFI.dlopen(file.name)
            if self._sanitizer == sanitized.ADDRESS:  # its runtime reads the file again, for source lines
                self._kept.append(files.pop_all())
        return shared_object

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """See `Device.launch`. Returns when all blocks have run."""
        self.stream_handle(stream)
        for one in launches:
            self._launch(one)

    def _launch(self, one: Launch) -> None:
        kernel: HostKernel = one.kernel
        launch = self._describe(kernel, one.grid, one.threads)
        total = one.grid[0] * one.grid[1] * one.grid[2]
        parts = min(total, 4 * _WORKERS) if _WORKERS > 1 else min(total, 1)
        edges = [total * i // parts for i in range(parts + 1)] if parts else []
        run = functools.partial(_run, kernel, launch, one.args)
        futures: list[Future[Failure | None]] = []
        try:
            futures.extend(_POOL.submit(run, first, last) for first, last in itertools.pairwise(edges))
            failures = [future.result() for future in futures]
        except BaseException:  # interrupted: no block may run on with arguments that are gone
            wait(futures)
            raise
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


def _loaded(artifact: Artifact, shared_object: Any) -> HostKernel:
    try:
        return HostKernel(artifact, shared_object, shared_object.hk_workspace_bytes)
    except KeyError:  # a kernel of another revision may bring that revision's runtime
        raise DeviceError(
            f"{artifact.entry} has a host runtime that cannot be called from this version; render it with the "
            "templates of this version"
        ) from None


@dataclass(frozen=True)
class Failure:
    """What the fiber runtime reported: a code, the block and thread, and the source lines concerned."""

    code: int
    block: tuple[int, int, int]
    thread: int
    at: Place
    other: Place

    def exception(self, artifact: Artifact) -> DeviceError:
        """The error to raise, with the text of the source lines."""

        places = Places.of(artifact.source)

        def quoted(place: Place) -> str:
            text = places.text(place)
            return f"{place}: {text!r}" if text else "its end"

        at = f"{artifact.entry}, block {self.block}, thread {self.thread}"
        here, there = quoted(self.at), quoted(self.other)
        if self.code == _NO_ARENA:
            return DeviceError(
                f"{artifact.entry}: no memory for the stacks of a block's threads, {STACK_BYTES // 1024} KiB and two "
                f"mappings each (Linux: vm.max_map_count), on each of {_WORKERS} cores"
            )
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
                f"{artifact.entry}, block {self.block}: wrote {self.at.line} bytes behind its "
                f"{artifact.resources.lds_bytes} bytes of LDS"
            )
        if self.code == _LANES_DIFFER:
            return DeviceError(
                f"{at}: the lanes of a wave ask for different lanes at {here}; lane_get_uniform takes one lane for "
                "all, lane_get each its own"
            )
        if self.code == _MISALIGNED:
            return DeviceError(
                f"{at}: the address is not a multiple of {self.other.line} at {here}; declare what it is a multiple "
                "of, Tensor(align=...), or name a smaller one: load_vec<COUNT, ALIGN>, store_vec<ALIGN>"
            )
        if self.code >= sanitized.FIRST_CODE:
            fault = list(sanitized.FAULTS.values())[self.code - sanitized.FIRST_CODE]
            return UndefinedBehaviour(f"{at}: {fault}, at {here}, column {self.other.line}")
        return DeviceError(f"{at}: the host runtime returned {self.code}")


def _run(kernel: HostKernel, launch: Any, args: KernelArgs, first: int, last: int) -> Failure | None:
    try:
        own = arena(launch.threads, kernel.workspace_bytes)
    except OSError:
        return Failure(_NO_ARENA, (0, 0, 0), 0, Place(), Place())
    memory = _FFI.new(
        "hk_arena*", (_FFI.cast("void*", own.workspace), _FFI.cast("char*", own.stacks), STACK_BYTES, own.stride)
    )
    report = _FFI.new("hk_report*")
    pointers = _FFI.cast("void**", args.address)
    code = kernel.shared_object.hk_run(launch, pointers, first, last, memory, report)
    if code == 0:
        return None
    where = (report.block[0], report.block[1], report.block[2])
    at, other = _place(report.file, report.line), _place(report.other_file, report.other_line)
    return Failure(code, where, report.thread, at, other)


def _place(file: Any, line: int) -> Place:
    """A line that the runtime names; a kernel of another revision may name no file."""
    return Place(_FFI.string(file).decode() if file else "", line)
