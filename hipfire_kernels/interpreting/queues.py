"""The streams of an `isa:` device: what is queued is done when somebody waits for it, and no sooner.

A piece of work knows what it has to come behind: the one ahead of it in its stream, and what the stream was told to
wait for. Nothing else holds it: a program that relies on an order it did not ask for gets another, and a wrong result.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from hipfire_kernels.errors import DeviceError

DEFAULT = 0
_FIRST_HANDLE = 16
"""Below it are handles that mean a default stream."""

T = TypeVar("T")


@dataclass(eq=False)
class Work:
    """Something that is queued.

    Attributes:
        do: what is to be done; nothing for a mark.
        ahead: what has to be done before.
        at: when it was done, in seconds.
    """

    do: Callable[[], None] | None
    ahead: list[Work]
    done: bool = False
    at: float = 0.0


@dataclass(eq=False)
class Stream:
    """A stream: the last of its work, and what a capture has so far."""

    last: Work | None = None
    captured: list[Callable[[], None]] | None = None


@dataclass(eq=False)
class Event:
    """A point in a stream, once it was recorded."""

    mark: Work | None = None


@dataclass(eq=False)
class Graph:
    """Launches, in order."""

    launches: tuple[Callable[[], None], ...]


@dataclass
class Queues:
    """Streams, events and graphs by their handles. Any thread may call; work is done by the one that waits for it."""

    _streams: dict[int, Stream] = field(default_factory=lambda: {DEFAULT: Stream()})
    _events: dict[int, Event] = field(default_factory=dict)
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _todo: list[Work] = field(default_factory=list)
    _fault: Exception | None = None
    _handles: Iterator[int] = field(default_factory=lambda: itertools.count(_FIRST_HANDLE))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _working: bool = False

    # -- streams --

    def create(self) -> int:
        """A new stream, which waits for no other by itself."""
        return self._new(self._streams, Stream())

    def destroy(self, handle: int) -> None:
        """End a stream. What it has queued is done nevertheless."""
        self._find(self._streams, handle, "stream")
        del self._streams[handle]

    def known(self, handle: int) -> bool:
        """Whether a handle is a stream's."""
        return handle in self._streams

    def enqueue(self, handle: int, do: Callable[[], None] | None) -> Work:
        """Put something at the end of a stream, or into the graph that is captured there."""
        with self._lock:
            stream = self._find(self._streams, handle, "stream")
            if stream.captured is not None:
                stream.captured += [do] if do is not None else []
                return Work(None, [], True)
            work = Work(do, [stream.last] if stream.last is not None and not stream.last.done else [])
            stream.last = work
            self._todo.append(work)
            return work

    def wait_for(self, handle: int, event: int) -> None:
        """Have a stream wait for what an event marks."""
        with self._lock:
            mark = self._find(self._events, event, "event").mark
            if mark is not None:
                work = self.enqueue(handle, None)
                work.ahead += [mark] if not mark.done else []

    def synchronize(self, handle: int) -> None:
        """Do all that is queued on a stream.

        Raises:
            DeviceError: work since the last wait has failed.
        """
        with self._lock:
            self._no_capture("a wait")
            last = self._find(self._streams, handle, "stream").last
            if last is not None:
                self._force(last)
            self._tell()

    def drain(self) -> bool:
        """Do all that is queued. Failures are told by the next wait.

        Returns:
            Whether it is done. It is not where a work itself asks for it: by an array that is collected meanwhile.
        """
        with self._lock:
            while self._todo and not self._working:
                self._force(self._todo[-1])
            return not self._working

    def synchronize_all(self) -> None:
        """Do all that is queued on the device.

        Raises:
            DeviceError: work since the last wait has failed.
        """
        with self._lock:
            self._no_capture("a wait")
            self.drain()
            self._tell()

    def _force(self, work: Work) -> None:
        """Do a piece of work, and of the rest only what it has to come behind."""
        chain = [work]
        while chain:
            left = [one for one in chain[-1].ahead if not one.done]
            if left:
                chain += left
            else:
                self._perform(chain.pop())

    def _perform(self, work: Work) -> None:
        if work.done:
            return
        self._working = True
        try:
            if work.do is not None:
                work.do()
        except Exception as error:  # of the interpreter too: who waits must not take what is there for a result
            self._fault = self._fault or error
        finally:
            self._working = False
            work.done, work.at = True, time.perf_counter()
            work.do, work.ahead = None, []
            self._todo.remove(work)

    def _tell(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    # -- events --

    def event(self) -> int:
        """A new event."""
        return self._new(self._events, Event())

    def forget_event(self, handle: int) -> None:
        """End an event."""
        self._find(self._events, handle, "event")
        del self._events[handle]

    def record(self, event: int, stream: int) -> None:
        """Mark the current end of a stream."""
        self._find(self._events, event, "event").mark = self.enqueue(stream, None)

    def synchronize_event(self, event: int) -> None:
        """Do what comes before an event.

        Raises:
            DeviceError: work since the last wait has failed.
        """
        with self._lock:
            mark = self._find(self._events, event, "event").mark
            if mark is not None:
                self._force(mark)
            self._tell()

    def milliseconds(self, start: int, end: int) -> float:
        """From one event that was reached to another: this machine's time, which says nothing of a card's."""
        marks = [self._find(self._events, one, "event").mark for one in (start, end)]
        first, last = marks
        if first is None or last is None or not first.done or not last.done:
            raise DeviceError("the time between events that were not both recorded and reached")
        return 1e3 * (last.at - first.at)

    # -- captures --

    def begin(self, handle: int) -> None:
        """Keep what is launched on a stream, instead of doing it."""
        stream = self._find(self._streams, handle, "stream")
        if handle == DEFAULT or stream.captured is not None:
            raise DeviceError("a capture of a default stream, or of one that is being captured already")
        stream.captured = []

    def end(self, handle: int) -> int:
        """What was kept, as a graph."""
        stream = self._find(self._streams, handle, "stream")
        captured, stream.captured = stream.captured, None
        if captured is None:
            raise DeviceError("the end of a capture that has not begun")
        return self._new(self._graphs, Graph(tuple(captured)))

    def replay(self, graph: int, stream: int) -> None:
        """Queue the launches of a graph."""
        for one in self._find(self._graphs, graph, "graph").launches:
            self.enqueue(stream, one)

    def forget_graph(self, handle: int) -> None:
        """End a graph. A replay that is queued goes on."""
        self._find(self._graphs, handle, "graph")
        del self._graphs[handle]

    def _no_capture(self, what: str) -> None:
        if any(stream.captured is not None for stream in self._streams.values()):
            raise DeviceError(f"{what} while a stream is being captured, which HIP does not survive")

    def _new(self, among: dict[int, T], made: T) -> int:
        handle = next(self._handles)
        among[handle] = made
        return handle

    def _find(self, among: dict[int, T], handle: int, what: str) -> T:
        found = among.get(handle)
        if found is None:
            raise DeviceError(f"{handle} is no live {what}")
        return found
