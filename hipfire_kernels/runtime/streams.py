"""Streams, events and captured graphs of a GPU."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError

if TYPE_CHECKING:
    from .gpu import GpuDevice


class Stream:
    """A stream of one device, destroyed with its last reference."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        device.driver.activate(device.index)
        self.handle = device.driver.stream_create()

    def synchronize(self) -> None:
        """Wait for all work queued on the stream."""
        self.device.waiting(self.device.driver.stream_synchronize, self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.device.driver.activate(self.device.index)
                self.device.driver.stream_destroy(self.handle)


class Event:
    """A point in a stream, with a time."""

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        device.driver.activate(device.index)
        self.handle = device.driver.event_create()

    def record(self, stream: Any = None) -> Event:
        """Mark the current end of a stream."""
        self.device.driver.activate(self.device.index)
        self.device.driver.event_record(self.handle, self.device.stream_handle(stream))
        return self

    def synchronize(self) -> None:
        """Wait until the point has been reached."""
        self.device.waiting(self.device.driver.event_synchronize, self.handle)

    def ms_since(self, start: Event) -> float:
        """Milliseconds from another recorded event to this one; waits for this one."""
        self.synchronize()
        return self.device.driver.event_elapsed_ms(start.handle, self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.device.driver.activate(self.device.index)
                self.device.driver.event_destroy(self.handle)


class Graph:
    """A captured sequence of launches. Keeps alive what the library made for them: arguments, workspaces, outputs.

    Attributes:
        entries: the kernels in it.
        keeps: what lives as long as the graph. Arrays made before the capture are the caller's: keep them, or add them.
    """

    def __init__(self, device: GpuDevice) -> None:
        self.device = device
        self.handle = 0
        self.entries: list[str] = []
        self.keeps: list[Any] = []

    def launch(self, stream: Any = None) -> None:
        """Replay it."""
        if not self.handle:
            raise DeviceError("the graph's capture has not ended, or has failed; nothing to replay")
        handle = self.device.stream_handle(stream)
        self.device.driver.activate(self.device.index)
        self.device.driver.graph_launch(self.handle, handle)
        self.device.launched(f"a graph of {', '.join(self.entries)}")

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.device.driver.activate(self.device.index)
                self.device.driver.graph_destroy(self.handle)
