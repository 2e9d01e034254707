"""What a vendor's driver must do, and what memory, streams and graphs ask of the device they belong to."""

from __future__ import annotations

import os
from typing import Any, NoReturn, Protocol

from hipfire_kernels.errors import DeviceError

HINTS = {2: "free arrays, or plan for a shorter context", 209: "the code object is for another arch"}
"""What to do about a status, where its name does not say it. The vendors have the same numbers."""


class Driver(Protocol):
    """What a vendor's driver must do. Handles are integers; every failure is a DeviceError that names the call."""

    vendor: str
    toolchain: str
    dlpack_device: int

    def activate(self, index: int) -> None:
        """Make the device's context current on this thread."""

    def arch_name(self, index: int) -> str:
        """As the vendor spells it, feature suffix included."""

    def describe(self, index: int) -> dict[str, Any]:
        """Name, driver and runtime versions, multiprocessors, memory."""

    def malloc(self, nbytes: int) -> int: ...
    def free(self, pointer: int) -> None: ...
    def copy_in(self, pointer: int, host: int, nbytes: int) -> None: ...
    def copy_out(self, host: int, pointer: int, nbytes: int) -> None: ...
    def owner(self, pointer: int) -> int | None:
        """Index of the device whose memory this is; None for memory of no device."""

    def stream_create(self) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_device(self, stream: int) -> int:
        """Index of the device a stream belongs to."""

    def stream_wait(self, stream: int, event: int) -> None: ...
    def synchronize(self) -> None: ...
    def event_create(self) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_elapsed_ms(self, start: int, end: int) -> float: ...
    def module_load(self, code: bytes) -> int: ...
    def module_unload(self, module: int) -> None: ...
    def module_function(self, module: int, entry: str, arena_bytes: int) -> Any:
        """What `launch` takes. `arena_bytes`: LDS that the launch must give, beside what the kernel declares."""

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: int, params: int, stream: int, early: bool
    ) -> None:
        """Queue a launch; `early` as in `Launch`."""

    def capture_begin(self, stream: int) -> None: ...
    def capture_end(self, stream: int) -> int:
        """The instantiated graph."""

    def graph_launch(self, graph: int, stream: int) -> None: ...
    def graph_destroy(self, graph: int) -> None: ...


class Owner(Protocol):
    """The device that memory, streams and graphs belong to. `gpu.GpuDevice` is the one there is."""

    name: str
    index: int
    driver: Driver
    default_stream: int

    def stream_handle(self, stream: Any) -> int:
        """The handle of a stream of this device."""

    def order_after(self, earlier: int, later: int) -> None:
        """Make one stream wait for what another has queued so far."""

    def waiting(self, wait: Any, *args: Any) -> None:
        """Wait, and attribute a fault that shows up to the launches since the last wait."""

    def launched(self, what: str) -> None:
        """Note a launch, for the report of a fault."""


def refuse_after_fork(driver: Any) -> None:
    """Have a driver refuse all that needs a device in processes forked from here on: its state does not go with them.

    It still counts its devices, so that "auto" does not turn to the host there.
    """
    known = driver.count()

    def refuse(*_: Any) -> NoReturn:
        raise DeviceError(
            f"{driver.vendor} devices were opened before this process was forked, and no GPU driver survives that; "
            "start processes with multiprocessing's 'spawn' or 'forkserver', or open the first device in the child"
        )

    def in_forked_child() -> None:
        driver.activate = driver.describe = refuse  # every other call comes behind one of these
        driver.count = lambda: known

    os.register_at_fork(after_in_child=in_forked_child)
