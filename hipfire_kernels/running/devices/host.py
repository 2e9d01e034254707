"""The CPU as a device: kernels run as fibers in a shared object (`templates/dialect_host.h`), blocks on all cores.

Arrays are numpy arrays. The OS threads of a pool take ranges of blocks; cffi releases the GIL around each. What a
kernel computes does not depend on how blocks are spread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cffi
import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.places import NOWHERE, Place, Places
from hipfire_kernels.building import lines, scratch
from hipfire_kernels.building.toolchains import sanitized
from hipfire_kernels.errors import DeadlockError, DeviceError, InputError, UndefinedBehaviour
from hipfire_kernels.running.devices import dlpack, guarded, memory, memory_check
from hipfire_kernels.running.devices.arena import STACK_BYTES, arena
from hipfire_kernels.running.devices.protocol import (
    Launch,
    OfThisProcess,
    View,
    dtype_name,
    require_aligned,
    require_contiguous,
)
from hipfire_kernels.running.workers import CORES, Workers

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact

_CDEF = """
typedef struct {
    unsigned grid[3], threads, lds_bytes, permute;
    unsigned long long seed;
    unsigned lds_changed;
    unsigned char fill, other;
    unsigned char flush_f16;
} hk_launch;
typedef struct { const char *name, *type; unsigned offset, align, count, bytes; } hk_lds_array;
typedef struct { unsigned char* at; unsigned from, to; } hk_lds_place;
typedef struct {
    void* workspace;
    char* stacks;
    unsigned long stack_bytes, stack_stride;
    const hk_lds_place* lds;
} hk_arena;
typedef struct {
    unsigned block[3], thread;
    int line, other_line;
    const char *file, *other_file;
    int signal, code, write;
    unsigned long address, instruction, stack;
} hk_report;
extern unsigned long hk_workspace_bytes;
extern hk_lds_array hk_lds[];
extern unsigned hk_lds_count;
void hk_handle_faults(int on);
int hk_run(const hk_launch*, void**, unsigned long long first, unsigned long long last, const hk_arena*, hk_report*);
"""
_NO_ARENA, _WAVE_LINES, _BARRIER_LINES, _DEADLOCK, _LDS_OVERRUN = -1, 1, 2, 3, 4  # the first is not hk_run's
_LDS_ARRAY_OVERRUN, _FAULT = 5, 6
_LANES_DIFFER, _MISALIGNED = 20, 21


_FFI: Any = cffi.FFI()
_FFI.cdef(_CDEF)
# With the stacks of 384 threads each, 64 workers take 49,000 of the 65,530 mappings that Linux grants a process.
_WORKERS = Workers(min(CORES, 64), "hipfire-block")


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

    @functools.cached_property
    def lds(self) -> tuple[guarded.LdsArray, ...]:
        """Its LDS arrays.

        Raises:
            DeviceError: its runtime cannot leave a launch that faults: it switches fibers by the C library's means, or
                is that of an older revision.
        """
        try:
            _ = self.shared_object.hk_handle_faults
            count = self.shared_object.hk_lds_count
        except (AttributeError, KeyError):
            raise DeviceError(
                f"{self.artifact.entry} cannot be checked: its host runtime does not leave a launch that faults; "
                "render it with the templates of this version, without HK_PORTABLE_SWITCH"
            ) from None
        found = (self.shared_object.hk_lds[i] for i in range(count))
        return tuple(guarded.LdsArray(_text(x.name), _text(x.type), x.offset, x.align, x.count, x.bytes) for x in found)

    @functools.cached_property
    def _text(self) -> tuple[int, range]:
        """Where the file's address 0 lies, and the file's addresses of instructions."""
        code = self.artifact.code
        return int(_FFI.cast("uintptr_t", self.shared_object.hk_run)) - lines.symbol(code, "hk_run"), lines.text(code)

    def own(self, instruction: int, stack: range) -> int | None:
        """An instruction of this kernel, as an address in its file.

        Args:
            instruction: its address. One that is not the kernel's is of a function that it has called: then it is the
                first address on the stack that may be where that returns to.
            stack: what may be read of it, from its top on.
        """
        start, own = self._text
        if instruction - start in own:
            return instruction - start
        words = (ctypes.c_uint64 * (len(stack) // 8)).from_address(stack.start) if stack else ()
        return next((word - start - 1 for word in words if word - start in own), None)


class HostDevice(OfThisProcess):
    """The CPU.

    Args:
        thread_order: None runs the threads of a block in index order. A seed permutes them between switch points:
            a result that changes with the seed is a race.
        sanitizer: `undefined` or `address`: run kernels compiled with its checks; see `toolchains.sanitized`.
        checked: put every launch under the check of `memory_check`.
        flush_f16: the matrix operation reads subnormal f16 operands as zero, as some matrix units do. Kernels must be
            right either way.

    Raises:
        InputError: `checked`, and this machine has no such check.
    """

    multiprocessors = 8  # whatever the cores: on another machine a call must not come out with other bits
    capturing = False
    send_instead = "send its name, and call hipfire_kernels.device(name) there"

    def __init__(
        self,
        thread_order: int | None = None,
        sanitizer: str | None = None,
        *,
        checked: bool = False,
        flush_f16: bool = False,
    ) -> None:
        if checked and (why := memory_check.unsupported()):
            raise InputError(why)
        self.arch = arch("host")
        self.name = "+".join(("host", *([sanitizer] if sanitizer else ()), *(["flush"] if flush_f16 else ())))
        self.toolchain: str | None = None if sanitizer is None else f"host+{sanitizer}"
        self._sanitizer = sanitizer
        self._kept: list[contextlib.ExitStack] = []
        if sanitizer == sanitized.ADDRESS:
            sanitized.require_loaded(self.arch)
        self.thread_order, self.checked, self.flush_f16 = thread_order, checked, flush_f16
        self.memory_bytes = memory.total()
        self._loaded: dict[str, HostKernel] = {}

    def __repr__(self) -> str:
        order = "" if self.thread_order is None else f" thread_order={self.thread_order}"
        return f"<HostDevice {self.name}{order}>"

    @functools.cached_property
    def _twin(self) -> HostDevice:
        twin = HostDevice(self.thread_order, checked=True, flush_f16=self.flush_f16)
        twin._loaded = self._loaded
        return twin

    def checking(self, *, required: bool = False) -> HostDevice:
        """See `Device.checking`. Kernels under a sanitizer have that one's checks, and not this one."""
        if self.checked:
            return self
        if self._sanitizer is not None:
            why = f"a checked launch on {self.name}; kernels under a sanitizer have its checks alone"
        else:
            why = memory_check.unsupported()
        if why and required:
            raise InputError(why)
        if why and self._sanitizer is None:
            warnings.warn(f"kernels run without the memory check: {why}", RuntimeWarning, stacklevel=2)
        if why:
            return self
        self._twin.thread_order = self.thread_order
        return self._twin

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
        total = one.grid[0] * one.grid[1] * one.grid[2]
        parts = min(total, 4 * _WORKERS.most) if _WORKERS.most > 1 else min(total, 1)
        stretches = list(itertools.pairwise([total * i // parts for i in range(parts + 1)] if parts else []))
        if not self.checked or not stretches:
            self._spread(one, [memory_check.Part(one.args, (blocks,)) for blocks in stretches])
            return
        check = memory_check.Check(one, kernel.artifact.entry, kernel.lds, functools.partial(self._spread, one))
        with memory_check.handled(kernel.shared_object):
            check(stretches)

    def _spread(self, one: Launch, parts: Sequence[memory_check.Part]) -> None:
        """Run parts of a launch on the threads of the pool, and raise the first failure by their order."""
        kernel: HostKernel = one.kernel
        futures: list[Future[Failure | None]] = []
        try:
            for part in parts:
                launch = self._describe(kernel, one, part.under)
                futures.append(_WORKERS.threads.submit(_run, kernel, launch, one.threads, part))
            failures = [future.result() for future in futures]
        except BaseException:  # interrupted: no block may run on with arguments that are gone
            wait(futures)
            raise
        for failure in failures:
            if failure is not None:
                raise failure.exception(kernel.artifact)

    def _describe(self, kernel: HostKernel, one: Launch, under: guarded.Under | None) -> Any:
        return _FFI.new(
            "hk_launch*",
            {
                "grid": one.grid,
                "threads": one.threads,
                "lds_bytes": kernel.artifact.resources.lds_bytes,
                "permute": self.thread_order is not None,
                "seed": self.thread_order or 0,
                "lds_changed": 0 if under is None else under.changed,
                "fill": guarded.FILL,
                "other": guarded.OTHER,
                "flush_f16": self.flush_f16,
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
    """What the fiber runtime reported: a code, the block and thread, and the source lines concerned.

    Attributes:
        fault: what the processor refused, in words, and the array concerned.
        instruction: where, as an address in the kernel's file.
    """

    code: int
    block: tuple[int, int, int]
    thread: int | None
    at: Place = NOWHERE
    other: Place = NOWHERE
    fault: guarded.Said | None = None
    instruction: int | None = None

    def exception(self, artifact: Artifact) -> DeviceError:
        """The error to raise, with the text of the source lines."""

        places = Places.of(artifact.source)

        def quoted(place: Place) -> str:
            text = places.text(place)
            return f"{place}: {text!r}" if text else "its end"

        at = f"{artifact.entry}, block {self.block}" + ("" if self.thread is None else f", thread {self.thread}")
        here, there = quoted(self.at), quoted(self.other)
        if self.code == _NO_ARENA:
            return DeviceError(
                f"{artifact.entry}: no memory for the stacks of a block's threads, {STACK_BYTES // 1024} KiB and two "
                f"mappings each (Linux: vm.max_map_count), on each of {_WORKERS.most} cores"
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
        if self.fault is not None:
            return self.fault.error(at, self.thread, self._lines(artifact.code, quoted))
        if self.code >= sanitized.FIRST_CODE:
            fault = list(sanitized.FAULTS.values())[self.code - sanitized.FIRST_CODE]
            return UndefinedBehaviour(f"{at}: {fault}, at {here}, column {self.other.line}")
        return DeviceError(f"{at}: the host runtime returned {self.code}")

    def _lines(self, code: bytes, quoted: Callable[[Place], str]) -> list[str]:
        """The lines of the instruction, inside out."""
        if self.instruction is None:
            return []
        found = [quoted(one) for one in lines.frames(code, self.instruction)]
        close = None if found else lines.near(code, self.instruction)
        return found if close is None else [f"or near {quoted(close)}"]


def _run(kernel: HostKernel, launch: Any, threads: int, part: memory_check.Part) -> Failure | None:
    under = part.under
    try:
        own = arena(threads, kernel.workspace_bytes)
        lds = None if under is None else guarded.lds_pages(kernel.lds)
    except OSError:
        return Failure(_NO_ARENA, (0, 0, 0), 0, NOWHERE, NOWHERE)
    places = _FFI.NULL if under is None or lds is None else _FFI.new("hk_lds_place[]", _places(lds, under))
    memory = _FFI.new(
        "hk_arena*",
        (_FFI.cast("void*", own.workspace), _FFI.cast("char*", own.stacks), STACK_BYTES, own.stride, places),
    )
    report = _FFI.new("hk_report*")
    pointers = _FFI.cast("void**", part.args.address)
    hk_run = kernel.shared_object.hk_run
    codes = (hk_run(launch, pointers, first, last, memory, report) for first, last in part.stretches)
    code = next((code for code in codes if code), 0)
    if code == 0:
        return None
    where = (report.block[0], report.block[1], report.block[2])
    if under is None or lds is None or code not in (_LDS_ARRAY_OVERRUN, _FAULT):
        at, other = _place(report.file, report.line), _place(report.other_file, report.other_line)
        return Failure(code, where, report.thread, at, other)
    if code == _LDS_ARRAY_OVERRUN:
        return Failure(code, where, None, fault=guarded.overrun(lds.arrays[report.other_line], report.line))
    fault = guarded.Fault(report.signal, report.code, report.address, bool(report.write))
    instruction = kernel.own(report.instruction, own.above(report.stack))
    return Failure(code, where, report.thread, fault=fault.said(under, lds, own.span), instruction=instruction)


def _places(lds: guarded.LdsPages, under: guarded.Under) -> list[Any]:
    """One more than there are: the runtime is told of the check by an address that is not null."""
    return [(_FFI.cast("unsigned char*", at), first, last) for at, first, last in (*lds.places(under), (0, 0, 0))]


def _place(file: Any, line: int) -> Place:
    """A line that the runtime names; a kernel of another revision may name no file."""
    return Place(_text(file) if file else "", line)


def _text(characters: Any) -> str:
    text: str = _FFI.string(characters).decode()
    return text
