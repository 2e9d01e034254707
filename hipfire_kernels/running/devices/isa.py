"""The machine code of gfx11 and gfx12, interpreted: `gpu.Driver` without a card. See `interpreting`."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.archs import ARCHS
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.interpreting import execution, program
from hipfire_kernels.interpreting.execution import Call, Executed, Mode
from hipfire_kernels.interpreting.findings import Array
from hipfire_kernels.interpreting.program import Program
from hipfire_kernels.interpreting.queues import DEFAULT, Queues
from hipfire_kernels.running.devices import dlpack, memory
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import KernelArgs, Launch

if TYPE_CHECKING:
    from hipfire_kernels.building.builder import Artifact

_ALIGN = 256
_POISON = 0xFF
_FLUSHED = "+flush"


def names() -> tuple[str, ...]:
    """Of every such device, without and with subnormal f16 taken for zero."""
    archs = [one.name for one in ARCHS.values() if one.dialect == "amd"]
    return tuple(f"isa:{name}{mode}" for mode in ("", _FLUSHED) for name in archs)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a kernel's launches have executed."""

    program: Program
    launches: int
    executed: Executed


class IsaDriver:
    """See `gpu.Driver`: memory of this process, streams of `Queues`, launches on the machine.

    Attributes:
        traces: of each kernel what has run, by its artifact's key, until somebody clears it.
    """

    vendor = "isa"
    toolchain = "clang"
    dlpack_device = dlpack.EXTENSION

    def __init__(self, arch: str, mode: Mode) -> None:
        self.arch, self.mode = lookup(arch), mode
        self.traces: dict[str, Trace] = {}
        self._queues = Queues()
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._doomed: list[int] = []  # freed, and perhaps still used by what is queued
        self._modules: dict[int, Artifact] = {}
        self._thread = threading.local()

    def count(self) -> int:
        """One."""
        return 1

    def activate(self, index: int) -> None:
        """There is no context."""

    def arch_name(self, index: int) -> str:
        return self.arch.name

    def describe(self, index: int) -> dict[str, Any]:
        # The number of multiprocessors is no card's: a call must not come out with other bits on another machine.
        return {
            "name": f"interpreter of {self.arch.name}",
            "driver_api": 0,
            "multiprocessors": 8,
            "l2_bytes": 0,
            "memory_bytes": memory.total(),
        }

    # -- memory --

    def malloc(self, nbytes: int) -> int:
        if nbytes >= memory.WORTH_ASKING and nbytes > (left := memory.available()):
            raise DeviceError(f"{left:,} bytes are left. {memory.REMEDY}")
        raw = np.full(nbytes + _ALIGN, _POISON, np.uint8)
        pointer = -(-raw.ctypes.data // _ALIGN) * _ALIGN
        self._memory[pointer] = raw[pointer - raw.ctypes.data :][:nbytes]
        return pointer

    def free(self, pointer: int) -> None:
        if pointer not in self._memory or pointer in self._doomed:
            raise DeviceError(f"address {pointer:#x} was not allocated, or is freed already")
        self._doomed.append(pointer)
        if self._queues.drain():
            while self._doomed:
                self._memory.pop(self._doomed.pop())

    def _live(self, pointer: int, nbytes: int) -> bool:
        starts = sorted(self._memory)
        at = bisect.bisect_right(starts, pointer) - 1
        return at >= 0 and pointer + nbytes <= starts[at] + len(self._memory[starts[at]])

    def copy_in(self, pointer: int, host: int, nbytes: int) -> None:
        self._within(pointer, nbytes)
        staged = ctypes.string_at(host, nbytes)
        # As from pageable memory: the default stream waits for the bytes, no other does.
        self._queues.enqueue(DEFAULT, functools.partial(_move, pointer, staged, nbytes))

    def copy_out(self, host: int, pointer: int, nbytes: int) -> None:
        self._within(pointer, nbytes)
        self._queues.enqueue(DEFAULT, functools.partial(_move, host, pointer, nbytes))
        self._queues.synchronize(DEFAULT)

    def _within(self, pointer: int, nbytes: int) -> None:
        if not self._live(pointer, nbytes):
            raise DeviceError(f"a copy of {nbytes} bytes at {pointer:#x}, which are not all in one live allocation")

    def owner(self, pointer: int) -> int | None:
        return 0 if self._live(pointer, 1) else None

    # -- streams, events, graphs --

    def stream_create(self) -> int:
        return self._queues.create()

    def stream_destroy(self, stream: int) -> None:
        self._queues.destroy(stream)

    def stream_synchronize(self, stream: int) -> None:
        self._queues.synchronize(stream)

    def stream_device(self, stream: int) -> int:
        if not self._queues.known(stream):
            raise DeviceError(f"{stream} is no live stream")
        return 0

    def stream_wait(self, stream: int, event: int) -> None:
        self._queues.wait_for(stream, event)

    def synchronize(self) -> None:
        self._queues.synchronize_all()

    def event_create(self) -> int:
        return self._queues.event()

    def event_destroy(self, event: int) -> None:
        self._queues.forget_event(event)

    def event_record(self, event: int, stream: int) -> None:
        self._queues.record(event, stream)

    def event_synchronize(self, event: int) -> None:
        self._queues.synchronize_event(event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return self._queues.milliseconds(start, end)

    def capture_begin(self, stream: int) -> None:
        self._queues.begin(stream)

    def capture_end(self, stream: int) -> int:
        return self._queues.end(stream)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._queues.replay(graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._queues.forget_graph(graph)

    # -- kernels --

    def introduce(self, artifact: Artifact) -> None:
        """Say of which artifact the code is that this thread loads next: a driver is given the code alone."""
        self._thread.artifact = artifact

    def module_load(self, code: bytes) -> int:
        artifact: Artifact | None = getattr(self._thread, "artifact", None)
        if artifact is None or artifact.code != code:
            raise DeviceError("a code object that comes with no artifact, and so without its assembly text")
        handle = len(self._modules) + 1
        self._modules[handle] = artifact
        return handle

    def module_unload(self, module: int) -> None:
        self._modules.pop(module)

    def module_function(self, module: int, entry: str, arena_bytes: int) -> tuple[str, Program]:
        artifact = self._modules[module]
        return artifact.key, loaded(artifact)

    def expect(self, args: KernelArgs) -> None:
        """Say which arrays a launch with these arguments may access. It is then held to them."""
        if not hasattr(self._thread, "described"):
            self._thread.described = {}
        self._thread.described[args.address] = args

    def launch(
        self,
        function: tuple[str, Program],
        grid: tuple[int, int, int],
        block: int,
        params: int,
        stream: int,
        early: bool,
    ) -> None:
        key, kernel = function
        execution.refuse_shape(kernel, grid, block)
        given: KernelArgs | None = getattr(self._thread, "described", {}).pop(params, None)
        arrays = None if given is None else _arrays(given)
        values = execution.arguments(kernel, params)
        call = Call(kernel, grid, block, values, arrays)
        self._queues.enqueue(stream, functools.partial(self._run, key, call, self.mode))

    def _run(self, key: str, call: Call, mode: Mode) -> None:
        for one in call.arrays or ():
            if one.argument.nbytes and not self._live(one.address, one.argument.nbytes):
                raise DeviceError(f"{call.program.entry}: its argument {one.argument.name} is no live memory")
        everything = tuple((start, start + len(raw)) for start, raw in list(self._memory.items()))
        executed = execution.run(dataclasses.replace(call, memory=everything), mode)
        before = self.traces.get(key)
        if before is not None:
            executed = Executed(before.executed.runs + executed.runs, before.executed.lanes + executed.lanes)
        self.traces[key] = Trace(call.program, (before.launches if before else 0) + 1, executed)


def _move(to: int, source: int | bytes, nbytes: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _arrays(args: KernelArgs) -> tuple[Array, ...] | None:
    """Of arguments that come with their declaration, the arrays; None where nobody has said."""
    try:
        described = args.described()
    except InputError:
        return None
    return tuple(Array(args.values[one.slot].value or 0, one) for one in described)


_programs: dict[str, Program] = {}


def loaded(artifact: Artifact) -> Program:
    """The program of an artifact; read once in a process, for all devices.

    Raises:
        DeviceError: it cannot be interpreted; see `program.load`.
    """
    if artifact.key not in _programs:
        took = artifact.resources
        _programs[artifact.key] = program.load(
            artifact.code,
            artifact.assembly,
            artifact.entry,
            lookup(artifact.arch),
            artifact.source,
            took.vgprs or 0,
            took.max_workgroup or 0,
        )
    return _programs[artifact.key]


class IsaDevice(GpuDevice):
    """A card's machine code without the card.

    A launch is under every check there is, and what is found is raised where the host next waits.

    Args:
        flushed: the matrix unit takes subnormal f16 operands for zero.
        seed: of the order in which the waves of a block take turns.
    """

    survives = True
    has_time = False
    driver: IsaDriver

    def __init__(self, arch: str, *, flushed: bool = False, seed: int = 0) -> None:
        super().__init__(IsaDriver(arch, Mode(flushed, seed)), 0)
        self.name = f"isa:{arch}{_FLUSHED if flushed else ''}"

    def __repr__(self) -> str:
        return f"<IsaDevice {self.name} seed={self.driver.mode.seed}>"

    @property
    def thread_order(self) -> int | None:
        """See `Ordered`: the order in which the waves of a block take turns. It counts when a launch is queued."""
        return self.driver.mode.seed

    @thread_order.setter
    def thread_order(self, seed: int | None) -> None:
        self.driver.mode = dataclasses.replace(self.driver.mode, seed=seed or 0)

    def checking(self, *, required: bool = False) -> IsaDevice:
        """See `Device.checking`. Nothing runs here without."""
        return self

    def load(self, artifact: Artifact) -> tuple[Any, str]:
        """See `Device.load`."""
        self.driver.introduce(artifact)
        return super().load(artifact)

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """See `Device.launch`. Returns when the launches are queued."""
        for one in launches:
            self.driver.expect(one.args)
        super().launch(launches, stream)

    def waiting(self, wait: Any, *args: Any) -> None:
        """Wait. What is found names its kernel itself."""
        self._since_wait = []
        wait(*args)


def open_device(name: str) -> IsaDevice:
    """`isa:gfx1201`, or `isa:gfx1201+flush`."""
    arch, mode, _ = name.partition(":")[2].partition(_FLUSHED)
    return IsaDevice(arch, flushed=bool(mode))
