"""The order of work that several streams have: what is asked for holds, in every order that the streams allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inputs import CAPACITY, HEAD_DIM, HEADS, KV_HEADS, ROWS, Array, Inputs, chain, request
from on_foreign import Interface, Producer
from standin_lab import StandIn

import hipfire_kernels as hk
from hipfire_kernels.dispatch import VerifyGraph, graph, graph_key, policy
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.streams import Stream

SHAPE = (ROWS, HEADS, HEAD_DIM)


@pytest.fixture(params=[-1, 0, 1, 2, 3], ids=["at once", "late", "seed 1", "seed 2", "seed 3"])
def schedule(request: pytest.FixtureRequest, stub: StandIn) -> int:
    """When queued work is done."""
    stub.schedule(request.param)
    return int(request.param)


class Maker:
    """Queues what is different each time: draft attention over K and V that nobody else has."""

    def __init__(self, device: GpuDevice) -> None:
        rng = np.random.default_rng(11)
        self.device = device
        self.k, self.v = (rng.standard_normal((20, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
        self.there = [device.to_device(x) for x in (self.k, self.v)]
        self.queries = [rng.standard_normal(SHAPE, np.float32) for _ in range(6)]
        self.queries_there = [device.to_device(q) for q in self.queries]

    def queue(self, turn: int, out: DeviceArray, stream: Any = None) -> None:
        hk.draft_attend(self.queries_there[turn], *self.there, out=out, stream=stream)

    def wanted(self, turn: int) -> Array:
        made: Array = hk.draft_attend(self.queries[turn], self.k, self.v)
        return made


def empty(device: GpuDevice, count: int) -> list[DeviceArray]:
    return [device.to_device(np.full(SHAPE, np.nan, np.float32)) for _ in range(count)]


# ---- the stand-in itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_an_order_that_nobody_asked_for_is_not_there(ordered: bool, gpu0: GpuDevice, stub: StandIn) -> None:
    inputs, maker = Inputs.make(), Maker(gpu0)
    _, *caches = inputs.on(gpu0)
    positions, (made, out) = gpu0.to_device(chain(100)), empty(gpu0, 2)
    mine = gpu0.stream()
    maker.queue(0, made, stream=mine)
    if ordered:
        gpu0.order_after(mine.handle, gpu0.default_stream)
    hk.attend(made, *caches, positions, ctx=100, out=out)
    inputs.q = maker.wanted(0)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(100))) is ordered
    assert np.array_equal(gpu0.to_host(made), inputs.q)


def test_seeds_give_different_orders(gpu0: GpuDevice, stub: StandIn) -> None:
    """Two streams write one array: who is the last of them is open, and both are seen to be."""
    maker, streams = Maker(gpu0), [gpu0.stream(), gpu0.stream()]
    seen = set()
    for seed in range(12):
        stub.schedule(seed)
        (out,) = empty(gpu0, 1)
        for turn, stream in enumerate(streams):
            maker.queue(turn, out, stream=stream)
        gpu0.synchronize()
        seen.add(gpu0.to_host(out).tobytes())
    assert seen == {maker.wanted(turn).tobytes() for turn in range(2)}


def test_a_stream_waits_for_itself_alone(gpu0: GpuDevice) -> None:
    maker, mine, other = Maker(gpu0), gpu0.stream(), gpu0.stream()
    first, second = empty(gpu0, 2)
    maker.queue(0, first, stream=mine)
    maker.queue(1, second, stream=other)
    mine.synchronize()
    done = [np.empty(SHAPE, np.float32) for _ in range(2)]
    for host, array in zip(done, (first, second), strict=True):
        gpu0.driver.copy_out(host.ctypes.data, array.pointer, host.nbytes)
    assert np.array_equal(done[0], maker.wanted(0))
    assert np.isnan(done[1]).all()
    event = gpu0.event().record(other)
    event.synchronize()
    gpu0.driver.copy_out(done[1].ctypes.data, second.pointer, done[1].nbytes)
    assert np.array_equal(done[1], maker.wanted(1))


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_copies_and_launches(schedule: int, gpu0: GpuDevice) -> None:
    """What was copied in is there for any stream; what is copied out is done, whatever the stream."""
    maker, mine = Maker(gpu0), gpu0.stream()
    (out,) = empty(gpu0, 1)
    for turn in range(3):
        gpu0.write(maker.queries_there[0], maker.queries[turn])
        maker.queue(0, out, stream=mine)
        assert np.array_equal(gpu0.to_host(out), maker.wanted(turn))


# ---- a graph's stream and the default one ----------------------------------------------------------------------------


@pytest.fixture
def graphs_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph, "_logged", set())
    with policy.override(verify_graph=True):
        yield


def test_a_replay_comes_between_what_is_ahead_of_it_and_what_is_behind(
    schedule: int, graphs_on: None, gpu0: GpuDevice
) -> None:
    """Queries are made, attended with and used, turn by turn, and nobody waits in between."""
    inputs, maker, machine = Inputs.make(), Maker(gpu0), VerifyGraph(gpu0, "f32")
    q, *caches = inputs.on(gpu0)
    positions, (out,), used = gpu0.to_device(chain(100)), empty(gpu0, 1), empty(gpu0, 6)
    plan = hk.plan(request(gpu0, CAPACITY), gpu0)
    key = graph_key(gpu0, q=q, k=caches[0], v=caches[1], positions=positions, out=out)

    def step(stream: Stream | None) -> str:
        return plan.run(q, *caches, positions, out, stream=stream)

    for turn in range(6):
        maker.queue(turn, q)
        machine.run("layer", key, step)
        hk.attend(out, *caches, positions, ctx=100, out=used[turn])
    assert machine.counts == {"warmup": 1, "capture": 1, "replay": 4}
    for turn in range(6):
        inputs.q = maker.wanted(turn)
        inputs.q = inputs.wanted(chain(100))
        assert np.array_equal(gpu0.to_host(used[turn]), inputs.wanted(chain(100))), turn


# ---- a stream of the caller's ---------------------------------------------------------------------------------------


def test_calls_in_two_streams_keep_out_of_each_others_workspace(schedule: int, gpu0: GpuDevice) -> None:
    inputs, maker, streams = Inputs.make(), Maker(gpu0), [gpu0.stream(), gpu0.stream()]
    _, *caches = inputs.on(gpu0)
    positions, outs = gpu0.to_device(chain(CAPACITY)), empty(gpu0, 6)
    for turn, out in enumerate(outs):
        hk.attend(maker.queries_there[turn], *caches, positions, ctx=CAPACITY, out=out, stream=streams[turn % 2])
    for turn, out in enumerate(outs):
        inputs.q = maker.queries[turn]
        assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(CAPACITY))), turn


def test_a_producers_work_comes_ahead_of_the_launch(schedule: int, gpu0: GpuDevice) -> None:
    """By `__cuda_array_interface__`, which names the producer's stream; by DLPack the producer is told ours."""
    inputs, maker, theirs = Inputs.make(), Maker(gpu0), gpu0.stream()
    _, *caches = inputs.on(gpu0)
    positions, made, outs = gpu0.to_device(chain(100)), empty(gpu0, 4), empty(gpu0, 4)

    class Ordering(Producer):
        def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
            gpu0.order_after(theirs.handle, gpu0.stream_handle(stream))
            return super().__dlpack__(stream=stream, **more)

    kinds = [lambda array: Interface(array, stream=theirs.handle), Ordering]
    for turn, mine in enumerate((None, None, gpu0.stream(), gpu0.stream())):
        maker.queue(turn, made[turn], stream=theirs)
        foreign = kinds[turn % 2](made[turn])
        hk.attend(foreign, *caches, positions, ctx=100, out=outs[turn], stream=mine, device=gpu0)
    for turn, out in enumerate(outs):
        inputs.q = maker.wanted(turn)
        assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(100))), turn


def test_a_consumers_stream_waits_for_what_it_is_handed(schedule: int, gpu0: GpuDevice) -> None:
    inputs, maker, theirs = Inputs.make(), Maker(gpu0), gpu0.stream()
    _, *caches = inputs.on(gpu0)
    positions, (made, out) = gpu0.to_device(chain(100)), empty(gpu0, 2)
    maker.queue(0, made)
    made.__dlpack__(stream=theirs.handle)
    hk.attend(made, *caches, positions, ctx=100, out=out, stream=theirs)
    inputs.q = maker.wanted(0)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(100)))


# ---- launches that somebody else records -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["recording", "capturing"])
@pytest.mark.parametrize("planned", [False, True])
def test_what_another_library_records_is_right_at_every_context(
    how: str, planned: bool, schedule: int, gpu0: GpuDevice
) -> None:
    """The device does not know of the capture; the caller says so."""
    inputs, stream, driver = Inputs.make(), gpu0.stream(), gpu0.driver
    q, *caches = inputs.on(gpu0)
    positions, (out,) = gpu0.to_device(chain(40)), empty(gpu0, 1)
    asked = request(gpu0, CAPACITY, **{"capturing": False, how: True})
    plan = hk.plan(asked, gpu0)
    driver.capture_begin(stream.handle)
    if planned:
        plan.run(q, *caches, positions, out, stream=stream)
    else:
        hk.attend(q, *caches, positions, ctx=40, out=out, stream=stream, **{how: True})
    recorded = driver.capture_end(stream.handle)
    for ctx in (40, 129, CAPACITY, 8):
        gpu0.write(positions, chain(ctx))
        driver.graph_launch(recorded, stream.handle)
        assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(ctx))), ctx
    driver.graph_destroy(recorded)


def test_a_plan_for_a_recording_may_be_captured(gpu0: GpuDevice) -> None:
    inputs, stream = Inputs.make(), gpu0.stream()
    q, *caches = inputs.on(gpu0)
    positions, (out,) = gpu0.to_device(chain(40)), empty(gpu0, 1)
    plan = hk.plan(request(gpu0, CAPACITY, capturing=False, recording=True), gpu0)
    with gpu0.capture(stream) as captured:
        plan.run(q, *caches, positions, out, stream=stream)
    for ctx in (40, CAPACITY):
        gpu0.write(positions, chain(ctx))
        captured.launch(stream)
        assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(ctx))), ctx
