"""A GPU as a device: arrays, streams, events, graphs and launches over a vendor's driver.

One class serves CUDA and HIP; `cuda.py` and `hip.py` translate the two dozen driver calls it needs. Every call
activates the device's context first, so a device may be used from any thread. A launch error is raised at the launch.
A kernel that faults later is reported where the host next waits for the device, with the launches since the last wait.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import Arch, arch
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.arrays import Buffer, DeviceArray, read_interface
from hipfire_kernels.running.devices.driver import Driver
from hipfire_kernels.running.devices.protocol import (
    DTYPES,
    Launch,
    OfThisProcess,
    View,
    dtype_name,
    require_aligned,
    require_contiguous,
)
from hipfire_kernels.running.devices.streams import CaptureGate, Event, Graph, Stream

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact


class GpuDevice(OfThisProcess):
    """One GPU. See `Device` for the methods that all devices share."""

    send_instead = "send its name, and call hipfire_kernels.device(name) there, in a process that was not forked"

    survives = False
    """Whether it is as good as before after a kernel has failed. Of a card nobody knows."""

    has_time = True
    """Whether what a launch takes says anything of the arch."""

    default_stream = 0
    """The driver's legacy default stream: work of this library without a stream is ordered with everything else."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver, self.index = driver, index
        self.toolchain: str | None = driver.toolchain
        self.name = f"{driver.vendor}:{index}"
        driver.activate(index)
        self.reported_arch = driver.arch_name(index)
        self.arch: Arch = self._known_arch()
        facts = driver.describe(index)
        self.multiprocessors, self.memory_bytes = int(facts["multiprocessors"]), int(facts["memory_bytes"])
        self._loaded: dict[str, tuple[int, Any]] = {}
        self._since_wait: list[str] = []
        self._gate = CaptureGate()
        self._thread = threading.local()

    def __repr__(self) -> str:
        return f"<GpuDevice {self.name} {self.reported_arch}>"

    def _known_arch(self) -> Arch:
        try:
            return arch(self.reported_arch)
        except InputError as error:
            raise DeviceError(f"{self.name} cannot be used, no kernel is built for it: {error}") from None

    def describe(self) -> dict[str, Any]:
        """Name, versions and sizes, for reports."""
        return {"device": self.name, "arch": self.reported_arch, **self.driver.describe(self.index)}

    def checking(self, *, required: bool = False) -> GpuDevice:
        """See `Device.checking`. There is none on a GPU."""
        if required:
            raise InputError(f"a checked launch on {self.name}; the memory check is one of the host device")
        return self

    # -- arrays --

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """See `Device.empty`."""
        extents = tuple(int(extent) for extent in shape)
        kind = np.dtype(dtype)
        array = DeviceArray(Buffer(self, math.prod(extents) * kind.itemsize), 0, extents, kind)
        capture = self._capture
        if capture is not None:
            capture[1].keeps.append(array)
        return array

    def section(self, array: Any, start: int, shape: Sequence[int]) -> DeviceArray:
        """See `Device.section`."""
        extents = tuple(int(extent) for extent in shape)
        if start < 0 or start + math.prod(extents) > array.size:
            raise InputError(f"section {start} + {extents} is outside {array!r}")
        return DeviceArray(array.buffer, array.offset + start * array.dtype.itemsize, extents, array.dtype)

    def to_device(self, array: npt.NDArray[Any]) -> DeviceArray:
        """See `Device.to_device`."""
        host = np.ascontiguousarray(array)
        with self._outside_captures("a copy to the device"):
            copy = self.empty(host.shape, host.dtype)
            self._copy_in(copy.pointer, host)
        return copy

    def _copy_in(self, pointer: int, host: npt.NDArray[Any]) -> None:
        """Copy, and wait until the bytes are there. A copy from pageable memory may return once they are staged: the
        default stream waits for the rest, but no stream of `stream()` does."""
        if host.nbytes:
            self.driver.copy_in(pointer, host.ctypes.data, host.nbytes)
            self.driver.stream_synchronize(self.default_stream)

    def write(self, array: DeviceArray, values: npt.NDArray[Any]) -> None:
        """Overwrite an array of this device with numpy values of its shape and dtype."""
        host = np.ascontiguousarray(values)
        if host.shape != array.shape or host.dtype != array.dtype:
            raise InputError(f"values are {host.dtype}{list(host.shape)}; required: {array.dtype}{list(array.shape)}")
        with self._outside_captures("a copy to the device"):
            pointer = self.view("array", array).pointer
            self.driver.activate(self.index)
            self._copy_in(pointer, host)

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        """See `Device.to_host`. Waits for the device."""
        with self._outside_captures("a copy to the host"):
            view = self.view("array", array)
            dtype: np.dtype[Any] | None = array.dtype if isinstance(array, DeviceArray) else DTYPES.get(view.dtype)
            if dtype is None:
                raise InputError(f"array has dtype {view.dtype}; required: one of {', '.join(DTYPES)}")
            host = np.empty(view.shape, dtype)
            self.synchronize()
            if host.nbytes:
                self.driver.copy_out(host.ctypes.data, view.pointer, host.nbytes)
        return host

    def view(self, name: str, array: Any) -> View:
        """See `Device.view`. Takes arrays of this device, `__cuda_array_interface__` and DLPack."""
        if isinstance(array, DeviceArray):
            return self._view_own(name, array)
        if isinstance(array, np.ndarray):
            raise InputError(
                f"{name} is a numpy array in host memory; required: an array on {self.name}, "
                f"for instance device.to_device({name})"
            )
        if hasattr(array, "__cuda_array_interface__"):
            found = self._view_interface(name, array.__cuda_array_interface__)
        elif hasattr(array, "__dlpack__"):
            found = self._view_dlpack(name, array)
        else:
            raise InputError(
                f"{name} is a {type(array).__name__}; {self.name} takes its own arrays, "
                "__cuda_array_interface__ and DLPack"
            )
        require_aligned(name, found)
        return found

    def _view_own(self, name: str, array: DeviceArray) -> View:
        if array.buffer.device is not self:
            raise InputError(f"{name} is on {array.buffer.device.name}; required: {self.name}, as the call's device")
        if not array.buffer.pointer:
            raise InputError(f"{name} has been freed: {array!r}")
        if array.offset:
            require_aligned(name, array.view)
        return array.view

    def _view_interface(self, name: str, interface: Any) -> View:
        found, producer = read_interface(name, interface)
        if math.prod(found.shape):
            self._require_here(name, found.pointer)
        if producer is not None:
            self._await_producer(self.stream_handle(producer))
        return found

    def _view_dlpack(self, name: str, array: Any) -> View:
        kind, index = array.__dlpack_device__()
        if (int(kind), int(index)) != (self.driver.dlpack_device, self.index):
            raise InputError(f"{name} is on DLPack device {int(kind)}:{index}; required: {self.name}")
        found = dlpack.peek(name, array, stream=self._dlpack_stream())
        self._await_producer(self.default_stream)  # which the producer has just been told to order its work before
        require_contiguous(name, found.shape, found.strides, 1)
        return View(found.pointer, found.shape, dtype_name(found.dtype), found.writable)

    def _await_producer(self, stream: int) -> None:
        """Have this thread's next launch wait for what a producer has queued on a stream.

        Not in a capture, which may wait for nothing outside it: the inputs have to be there when it is replayed.
        """
        if self.capturing:
            return
        if not hasattr(self._thread, "producers"):
            self._thread.producers = {}
        # The default stream stays; another may be gone by the time of a launch, so its end is marked now.
        self._thread.producers[stream] = None if stream == self.default_stream else self.event().record(stream)

    def _order_producers(self, launch_stream: int) -> None:
        producers: dict[int, Event | None] = getattr(self._thread, "producers", {})
        while producers:
            stream, queued = producers.popitem()
            if queued is None:
                self.order_after(stream, launch_stream)
            elif stream != launch_stream:
                self.driver.stream_wait(launch_stream, queued.handle)

    def _dlpack_stream(self) -> int:
        """The stream that a producer is to order its work before, in DLPack's words.

        None in a capture (-1), which the producer would spoil. Else the default stream, which is 1 with CUDA, where 0
        is not allowed, and 0 with ROCm.
        """
        if self.capturing:
            return -1
        return 1 if self.driver.dlpack_device == dlpack.CUDA else 0

    def _require_here(self, name: str, pointer: int) -> None:
        self.driver.activate(self.index)
        owner = self.driver.owner(pointer)
        if owner != self.index:
            where = "host memory" if owner is None else f"{self.driver.vendor}:{owner}"
            raise InputError(f"{name} is in {where}; required: {self.name}")

    # -- streams, events, graphs --

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def event(self) -> Event:
        """A new event."""
        return Event(self)

    def stream_handle(self, stream: Any) -> int:
        """The handle of a stream of this device: None, a Stream, a `__cuda_stream__` object or an integer handle.

        Raises:
            InputError: a stream of another device, or something else.
        """
        if stream is None:
            return self.default_stream
        if isinstance(stream, Stream):
            if stream.device is not self:
                raise InputError(f"the stream is one of {stream.device.name}; required: one of {self.name}")
            return stream.handle
        if hasattr(stream, "__cuda_stream__"):
            stream = stream.__cuda_stream__()[1]
        if not isinstance(stream, int) or isinstance(stream, bool):
            raise InputError(f"stream is {stream!r}; required: a stream of {self.name}, an integer handle, or None")
        if stream in (0, 1, 2):  # default streams are per context, and the context is this device's
            return self.default_stream if stream == 1 else stream  # older HIP runtimes do not know 1, the legacy one
        self.driver.activate(self.index)
        owner = self.driver.stream_device(stream)
        if owner != self.index:
            raise InputError(f"the stream is one of {self.driver.vendor}:{owner}; required: one of {self.name}")
        return stream

    def order_after(self, earlier: int, later: int) -> None:
        """Make one stream wait for what another has queued so far."""
        if earlier == later:
            return
        event = self.event().record(earlier)
        self.driver.stream_wait(later, event.handle)

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        with self._outside_captures("a wait for the device"):
            self.waiting(self.driver.synchronize)

    def waiting(self, wait: Any, *args: Any) -> None:
        """Wait, and attribute a fault that shows up to the launches since the last wait."""
        self.driver.activate(self.index)
        launched, self._since_wait = self._since_wait, []
        try:
            wait(*args)
        except DeviceError as error:
            raise DeviceError(
                f"{error}. Launched on {self.name} since it was last waited for: {', '.join(launched) or 'nothing'}"
            ) from error

    def launched(self, what: str) -> None:
        """Note a launch, for the report of a fault."""
        if len(self._since_wait) < 16:
            self._since_wait.append(what)

    def _no_capture(self, what: str) -> None:
        # HIP would take it as the end of the capture; CUDA would do it now and leave it out of the graph.
        if self.capturing:
            raise DeviceError(f"{what} cannot be part of the graph that {self.name} is capturing; do it before")

    @contextlib.contextmanager
    def _outside_captures(self, what: str) -> Iterator[None]:
        """For what a capture does not survive: refuse it inside this thread's own, keep it out of other threads'."""
        self._no_capture(what)
        self.driver.activate(self.index)
        with self._gate.passing():
            yield

    @property
    def _capture(self) -> tuple[int, Graph] | None:
        """Stream and graph of this thread's capture."""
        found: tuple[int, Graph] | None = getattr(self._thread, "capture", None)
        return found

    @property
    def capturing(self) -> bool:
        """See `Device.capturing`. Of this thread: another one may be capturing meanwhile."""
        return self._capture is not None

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """Capture what is launched on a stream inside the block into a graph, instead of running it.

        If the block raises, the capture is ended and dropped, and the stream is usable again. Copies and waits of
        other threads wait until it has ended. A replay is ordered with nothing but its own stream: have that wait for
        what makes the inputs, another library's arrays too.
        """
        self._no_capture("a capture")
        handle = self.stream_handle(stream)
        graph = Graph(self)
        self.driver.activate(self.index)
        with self._gate.closed():
            self.driver.capture_begin(handle)
            self._thread.capture = (handle, graph)
            try:
                yield graph
            except BaseException:
                with contextlib.suppress(DeviceError):
                    self.driver.graph_destroy(self.driver.capture_end(handle))
                raise
            finally:
                self._thread.capture = None
            graph.handle = self.driver.capture_end(handle)

    # -- kernels --

    def load(self, artifact: Artifact) -> tuple[Any, str]:
        """See `Device.load`."""
        if artifact.key not in self._loaded:
            self.driver.activate(self.index)
            module = self.driver.module_load(artifact.code)
            arena = self.arch.arena_bytes(artifact.resources.lds_bytes or 0)
            try:
                self._loaded[artifact.key] = (module, self.driver.module_function(module, artifact.entry, arena))
            except DeviceError:
                self.driver.module_unload(module)
                raise
        return (self._loaded[artifact.key][1], artifact.entry)

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """See `Device.launch`. Returns when the launches are queued."""
        handle = self.default_stream if stream is None else self.stream_handle(stream)
        driver = self.driver
        driver.activate(self.index)
        self._order_producers(handle)
        capture = self._capture
        if capture is not None and capture[0] != handle:
            capture = None
        noted = capture[1].entries if capture is not None else self._since_wait
        for (function, entry), grid, threads, args, early in launches:
            try:
                driver.launch(function, grid, threads, args.address, handle, early)
            except DeviceError as error:
                raise DeviceError(f"{entry}, grid {grid}, {threads} threads: {error}") from error
            if capture is not None:
                capture[1].keeps.append(args)
            if len(noted) < 16:
                noted.append(entry)
