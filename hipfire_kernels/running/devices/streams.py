"""Streams, events and captured graphs of a GPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.running.devices.driver import Owner


class Stream:
    """A stream of one device, destroyed with its last reference."""

    def __init__(self, device: Owner) -> None:
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

    def __init__(self, device: Owner) -> None:
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


class CaptureGate:
    """Lets copies and waits of many threads by, or one capture: HIP has neither survive the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passing = 0
        self._closed = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Wait until no capture goes on, and let none begin inside the block. Nests."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Wait until nothing passes and no capture goes on, and let nothing by inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed and not self._passing)
            self._closed = True
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Graph:
    """A captured sequence of launches. Keeps alive what the library made for them: arguments, workspaces, outputs.

    Attributes:
        entries: the kernels in it.
        keeps: what lives as long as the graph. Arrays made before the capture are the caller's: keep them, or add them.
    """

    def __init__(self, device: Owner) -> None:
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
