"""Timing on a device: paired and interleaved, on a GPU by events with a cold L2, on the host by the clock.

Every round times each call once, in an order that alternates forward and backward, so that a drift of the clocks
falls on all alike. On a GPU, before each timed call a buffer of many times the L2 is read: the call finds nothing of
its own there, and the device is busy while the host queues the call, so that no host time lies between the events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.binding import bind, prepare
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device

READ = KernelFamily(
    name="bench_read",
    doc="a stride of the buffer",
    params={},
    entry=lambda v: "bench_read",
    args=lambda v: (
        Tensor("data", "f32", ("floats",)),
        Tensor("out", "f32", (1,), writes=True),
        Scalar("quads", "i32"),
        Scalar("blocks", "i32"),
    ),
    grid=lambda v, s: (s.blocks, 1, 1),
    block=512,
    tolerance=Tolerance(0),
)


READ_ALL = READ.variant()


@dataclass(frozen=True)
class Times:
    """What one call took over the rounds, in microseconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median

    def as_dict(self) -> dict[str, Any]:
        """Median, minimum and quartile spread."""
        return {"us": round(self.median, 3), "min_us": round(min(self.samples), 3), "spread": round(self.spread, 4)}


def ratio(slow: Times, fast: Times) -> tuple[float, float, float]:
    """Median and quartiles of the paired ratio slow / fast, round by round."""
    pairs = [a / b for a, b in zip(slow.samples, fast.samples, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return middle, low, high


Calls = Mapping[str, Callable[[], Any]]


class Timer(Protocol):
    """Times calls on one device, in pairs that belong together: sample i of each call is from round i."""

    def interleaved(self, calls: Calls, rounds: int = 30, warmup: int = 3) -> dict[str, Times]:
        """Time each call `rounds` times, after `warmup` untimed ones."""


def timer(device: Device) -> Timer:
    """What times calls on a device.

    Raises:
        InputError: it interprets machine code, and its times say nothing.
    """
    return Stopwatch(device) if isinstance(device, GpuDevice) else HostTimer()


def _orders(calls: Calls, rounds: int) -> Iterator[list[str]]:
    """The order of each round: forward, backward, forward, ..."""
    names = list(calls)
    for index in range(rounds):
        yield names[:: 1 if index % 2 == 0 else -1]


class HostTimer:
    """Times calls that are done when they return, by the clock."""

    def interleaved(self, calls: Calls, rounds: int = 30, warmup: int = 3) -> dict[str, Times]:
        """See `Timer.interleaved`."""
        for call in calls.values():
            for _ in range(warmup):
                call()
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for order in _orders(calls, rounds):
            for name in order:
                began = time.perf_counter()
                calls[name]()
                samples[name].append(1e6 * (time.perf_counter() - began))
        return {name: Times(tuple(taken)) for name, taken in samples.items()}


class Stopwatch:
    """Times calls on a GPU, by events."""

    FLUSH_BYTES = 512 << 20
    """Over eight times the L2 of an H200 (60 MB), and about 130 us there: twice what queuing a call takes."""

    def __init__(self, device: GpuDevice) -> None:
        if not getattr(device, "has_time", True):
            raise InputError(
                f"a time on {device.name}, which interprets machine code: it would say nothing of a card. Its counts "
                "are what it has: hfk isa --executed"
            )
        self.device = device
        self._flush = device.empty((self.FLUSH_BYTES // 4,), np.float32)
        self._sink = device.empty((1,), np.float32)
        device.write(self._flush, np.zeros(self._flush.shape, np.float32))
        self._blocks = 4 * int(device.describe()["multiprocessors"])
        self._read_flush = self.reader(self._flush)

    def reader(self, data: DeviceArray) -> Callable[[], None]:
        """A call that queues a kernel which reads the buffer once."""
        views = {"data": self.device.view("data", data), "out": self.device.view("out", self._sink)}
        prepared = (prepare(bind(READ_ALL, views, quads=data.size // 4, blocks=self._blocks), self.device),)
        return lambda: self.device.launch(prepared)

    def interleaved(self, calls: Calls, rounds: int = 30, warmup: int = 3) -> dict[str, Times]:
        """See `Timer.interleaved`."""
        for call in calls.values():
            for _ in range(warmup):
                call()
        self.device.synchronize()
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for order in _orders(calls, rounds):
            for name in order:
                start, end = self.device.event(), self.device.event()
                self._read_flush()
                start.record()
                calls[name]()
                end.record()
                marks[name].append((start, end))
            self.device.synchronize()
        return {name: Times(tuple(1e3 * end.ms_since(start) for start, end in pairs)) for name, pairs in marks.items()}
