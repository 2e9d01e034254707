"""Streams, events, graphs and memory of the interpreter's devices: nothing is done before somebody waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from isa_lab import kernel

import hipfire_kernels as hk
from hipfire_kernels import Tensor
from hipfire_kernels.errors import DeviceError, InputError, MemoryFault, UndefinedBehaviour
from hipfire_kernels.interpreting.queues import DEFAULT, Queues
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.isa import IsaDevice
from hipfire_kernels.running.timing import timer

ADD = kernel("out[at] += 1.0f;", Tensor("out", "f32", ("n",), writes=True), name="add_one")
BEYOND = kernel("out[at + 32] = 1.0f;", Tensor("out", "f32", ("n",), writes=True), name="beyond")


@pytest.fixture
def on(host: object) -> IsaDevice:
    return IsaDevice("gfx1201")


def ones(on: IsaDevice, value: float = 0.0) -> DeviceArray:
    return on.to_device(np.full(32, value, np.float32))


def add(on: IsaDevice, to: DeviceArray, stream: object = None) -> None:
    hk.launch(ADD, on, out=to, n=32, stream=stream)


class TestQueues:
    def test_nothing_is_done_before_it_is_waited_for(self) -> None:
        done: list[str] = []
        queues = Queues()
        one, other = queues.create(), queues.create()
        queues.enqueue(one, lambda: done.append("a"))
        queues.enqueue(one, lambda: done.append("b"))
        queues.enqueue(other, lambda: done.append("c"))
        assert done == []
        queues.synchronize(other)
        assert done == ["c"]
        queues.synchronize_all()
        assert done == ["c", "a", "b"]

    def test_an_event_orders_two_streams(self) -> None:
        done: list[str] = []
        queues = Queues()
        one, other, event = queues.create(), queues.create(), queues.event()
        queues.enqueue(one, lambda: done.append("a"))
        queues.record(event, one)
        queues.enqueue(one, lambda: done.append("behind"))
        queues.wait_for(other, event)
        queues.enqueue(other, lambda: done.append("b"))
        queues.synchronize(other)
        assert done == ["a", "b"]
        end = queues.event()
        queues.record(end, other)
        with pytest.raises(DeviceError, match="not both recorded and reached"):
            queues.milliseconds(event, end)
        queues.synchronize_event(end)
        assert queues.milliseconds(event, end) >= 0

    def test_what_fails_is_told_once_and_holds_nothing_up(self) -> None:
        def fails() -> None:
            raise UndefinedBehaviour("a")

        done: list[str] = []
        queues = Queues()
        queues.enqueue(DEFAULT, fails)
        queues.enqueue(DEFAULT, lambda: done.append("b"))
        with pytest.raises(UndefinedBehaviour, match="a"):
            queues.synchronize(DEFAULT)
        assert done == ["b"]
        queues.synchronize(DEFAULT)

    def test_captures(self) -> None:
        done: list[str] = []
        queues = Queues()
        one = queues.create()
        queues.begin(one)
        queues.enqueue(one, lambda: done.append("a"))
        for wait in (queues.synchronize_all, lambda: queues.synchronize(DEFAULT)):
            with pytest.raises(DeviceError, match="while a stream is being captured"):
                wait()
        graph = queues.end(one)
        queues.synchronize_all()
        assert done == []
        queues.replay(graph, one)
        queues.replay(graph, one)
        queues.forget_graph(graph)
        queues.synchronize(one)
        assert done == ["a", "a"]
        with pytest.raises(DeviceError, match="is no live graph"):
            queues.replay(graph, one)
        with pytest.raises(DeviceError, match="that has not begun"):
            queues.end(one)
        with pytest.raises(DeviceError, match="a capture of a default stream"):
            queues.begin(DEFAULT)

    def test_handles(self) -> None:
        queues = Queues()
        one = queues.create()
        queues.destroy(one)
        for wrong in (
            lambda: queues.destroy(one),
            lambda: queues.enqueue(one, None),
            lambda: queues.record(99, DEFAULT),
        ):
            with pytest.raises(DeviceError, match="is no live"):
                wrong()


class TestDevice:
    def test_launches_on_streams_of_their_own(self, on: IsaDevice) -> None:
        array, stream = ones(on), on.stream()
        add(on, array, stream)
        add(on, array, stream)
        assert not on.driver.traces
        stream.synchronize()
        assert on.to_host(array).tolist() == [2.0] * 32

    def test_the_order_that_nobody_asked_for_is_not_kept(self, on: IsaDevice) -> None:
        """The copy back waits for the default stream alone."""
        array, stream = ones(on), on.stream()
        add(on, array, stream)
        host = np.zeros(32, np.float32)
        on.driver.copy_out(host.ctypes.data, array.pointer, host.nbytes)
        assert host.tolist() == [0.0] * 32
        on.order_after(stream.handle, on.default_stream)
        on.driver.copy_out(host.ctypes.data, array.pointer, host.nbytes)
        assert host.tolist() == [1.0] * 32

    def test_a_graph_of_launches(self, on: IsaDevice) -> None:
        array, stream = ones(on), on.stream()
        add(on, array)  # built and loaded
        with on.capture(stream) as graph:
            add(on, array, stream)
            add(on, array, stream)
        assert on.to_host(array).tolist() == [1.0] * 32
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        assert on.to_host(array).tolist() == [7.0] * 32
        assert graph.entries == ["add_one", "add_one"]

    def test_events(self, on: IsaDevice) -> None:
        array = ones(on)
        start = on.event().record()
        add(on, array)
        assert on.event().record().ms_since(start) >= 0

    def test_an_array_may_be_dropped_while_a_launch_is_queued(self, on: IsaDevice) -> None:
        array = ones(on)
        add(on, array)
        array.buffer.free()
        on.synchronize()
        assert on.driver.owner(0) is None

    def test_a_fault_is_raised_by_the_wait_and_the_device_goes_on(self, on: IsaDevice) -> None:
        array = ones(on)
        hk.launch(BEYOND, on, out=array, n=32)
        with pytest.raises(MemoryFault, match=r"beyond on gfx1201, .* out\[32\] of out \(f32 \[32\]\)") as found:
            on.synchronize()
        assert (found.value.array, found.value.index, found.value.thread) == ("out", 32, 0)
        add(on, array)
        assert on.to_host(array).tolist() == [1.0] * 32
        assert on.survives

    def test_nothing_is_timed(self, on: IsaDevice) -> None:
        """No evidence, no tuning and no bench may come from here."""
        with pytest.raises(InputError, match="a time on isa:gfx1201, which interprets machine code"):
            timer(on)

    def test_any_thread_may_launch(self, on: IsaDevice) -> None:
        arrays = [ones(on, float(i)) for i in range(4)]
        threads = [threading.Thread(target=add, args=(on, array, on.stream())) for array in arrays]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        on.synchronize()
        assert [on.to_host(array)[0] for array in arrays] == [1.0, 2.0, 3.0, 4.0]

    def test_attention_through_dispatch(self, on: IsaDevice) -> None:
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, 2, 128)).astype(np.float32)
        cache = hk.quantize_q8_0(rng.standard_normal((40, 1, 128)).astype(np.float32))
        positions = np.array([38, 39], np.int32)
        arrays = [on.to_device(x) for x in (q, cache, cache, positions)]
        got = on.to_host(hk.attend(*arrays, device=on))
        want = hk.reference.attend(q, cache, cache, positions)
        assert np.abs(got - want).max() < 1e-5


THREADS = """
import subprocess
import sys
import threading
import numpy as np
import hipfire_kernels as hk

device, rng, wrong = hk.device("isa:gfx1201"), np.random.default_rng(0), []
q = rng.standard_normal((4, 4, 128), np.float32)
k, v = (hk.quantize_q8_0(rng.standard_normal((200, 2, 128), np.float32)) for _ in range(2))

def work(n):
    positions = np.arange(36 + 13 * n, 40 + 13 * n, dtype=np.int32)
    for _ in range(3):
        got = device.to_host(hk.attend(*(device.to_device(a) for a in (q, k, v, positions))))
        wrong.append(float(np.abs(got - hk.reference.attend(q, k, v, positions)).max()))

threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(wrong) == 18 and max(wrong) < 1e-5, wrong
"""


def test_threads_that_are_the_first_to_use_it() -> None:
    """In a process of its own: what is made once is made by whichever of them comes first."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_fault_of_the_interpreter_is_told_by_the_next_wait() -> None:
    queues = Queues()

    def broken() -> None:
        raise TypeError("not a pointer to the same type")

    queues.enqueue(DEFAULT, broken)
    assert queues.drain()
    with pytest.raises(TypeError, match="not a pointer"):
        queues.synchronize(DEFAULT)
    queues.synchronize(DEFAULT)
