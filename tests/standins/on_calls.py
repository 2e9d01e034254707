"""Calls, streams and graphs on a device, and what is refused there before anything is launched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import opened
from inputs import CAPACITY, HEAD_DIM, HEADS, KV_HEADS, ROWS, Inputs, chain, request
from on_foreign import Interface, Producer
from standin_lab import CAPTURE_UNSUPPORTED, INVALID_HANDLE, StandIn

import hipfire_kernels as hk
from hipfire_kernels.errors import DeviceError, InputError, NotAdmitted
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice

# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctx", [8, 129, CAPACITY])
def test_attend(ctx: int, gpu0: GpuDevice) -> None:
    inputs = Inputs.make()
    for positions in (chain(ctx), gpu0.to_device(chain(ctx))):
        got = hk.attend(*inputs.on(gpu0), positions)
        assert isinstance(got, DeviceArray)
        assert np.array_equal(gpu0.to_host(got), inputs.wanted(chain(ctx)))


def test_attend_over_a_tree(gpu0: GpuDevice) -> None:
    inputs, rng = Inputs.make(), np.random.default_rng(1)
    bias = np.where(np.tri(ROWS, dtype=bool), rng.standard_normal((ROWS, ROWS), np.float32), -np.inf).astype(np.float32)
    positions = chain(200)
    got = hk.attend(*inputs.on(gpu0), positions, tree_bias=gpu0.to_device(bias))
    want = hk.attend(inputs.q, inputs.k_cache, inputs.v_cache, positions, tree_bias=bias)
    assert np.array_equal(gpu0.to_host(got), want)


@pytest.mark.parametrize("sliding", [{}, {"window": 20}, {"causal": True}])
def test_draft_attend(sliding: dict[str, Any], gpu0: GpuDevice) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32)
    k, v = (rng.standard_normal((50, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    got = hk.draft_attend(*map(gpu0.to_device, (q, k, v)), **sliding)
    assert np.array_equal(gpu0.to_host(got), hk.draft_attend(q, k, v, **sliding))


def test_kv_write(gpu0: GpuDevice) -> None:
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((5, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    caches = [np.full((40, KV_HEADS, HEAD_DIM // 32, 34), 7, np.uint8) for _ in range(2)]
    positions = np.array([3, 39, 0, 17, 4], np.int32)
    there = [gpu0.to_device(cache) for cache in caches]
    hk.kv_write(gpu0.to_device(k), gpu0.to_device(v), *there, positions)
    hk.kv_write(k, v, *caches, positions)
    for got, want in zip(there, caches, strict=True):
        assert np.array_equal(gpu0.to_host(got), want)


def test_an_empty_grid_launches_nothing(gpu0: GpuDevice, stub: StandIn) -> None:
    writing = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=True)
    cache = np.full((4, KV_HEADS, HEAD_DIM // 32, 34), 7, np.uint8)
    caches = [gpu0.to_device(cache) for _ in range(2)]
    for rows, launches in ((0, 0), (1, 1)):
        new, at = np.ones((rows, KV_HEADS, HEAD_DIM), np.float32), np.zeros(rows, np.int32)
        before = stub.calls("launch")
        k, v, positions = map(gpu0.to_device, (new, new, at))
        launch(writing, gpu0, k=k, v=v, k_cache=caches[0], v_cache=caches[1], positions=positions)
        assert stub.calls("launch") == before + launches
        assert np.array_equal(gpu0.to_host(caches[0]), cache) is not bool(rows)


def test_any_thread_may_call_whatever_its_current_device(gpu0: GpuDevice, gpu1: GpuDevice) -> None:
    inputs, positions = Inputs.make(), gpu0.to_device(chain(200))
    arrays, outs = inputs.on(gpu0), [gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32) for _ in range(4)]

    def call(out: DeviceArray) -> None:
        plan = hk.plan(request(gpu0, CAPACITY), gpu0)
        gpu1.driver.activate(1)
        plan.run(*arrays, positions, out)

    with ThreadPoolExecutor(len(outs)) as pool:
        list(pool.map(call, outs))
    for out in outs:
        assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(200)))


# ---- streams and events ---------------------------------------------------------------------------------------------


def test_streams_and_events(gpu0: GpuDevice, stub: StandIn) -> None:
    inputs, positions = Inputs.make(), chain(200)
    before = stub.live()
    stream, start, end = gpu0.stream(), gpu0.event(), gpu0.event()
    start.record(stream)
    by_handle = hk.attend(*inputs.on(gpu0), positions, stream=stream.handle)
    by_object = hk.attend(*inputs.on(gpu0), positions, stream=stream)
    by_protocol = hk.attend(*inputs.on(gpu0), positions, stream=Foreign(stream.handle))
    end.record(stream)
    stream.synchronize()
    assert end.ms_since(start) > 0
    for got in (by_handle, by_object, by_protocol):
        assert np.array_equal(gpu0.to_host(got), inputs.wanted(positions))
    del stream, start, end
    gc.collect()
    after = stub.live()
    assert all(after[kind] == before[kind] for kind in ("stream", "event"))


class Foreign:
    """Another library's stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def test_time_between_events_that_were_not_recorded_is_an_error(gpu0: GpuDevice, stub: StandIn) -> None:
    with pytest.raises(DeviceError, match=stub.failure("event_elapsed", INVALID_HANDLE)):
        gpu0.event().record().ms_since(gpu0.event())


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_a_plan", [False, True])
def test_a_captured_call_follows_the_context(through_a_plan: bool, gpu0: GpuDevice, stub: StandIn) -> None:
    """Captured at one context and replayed at others, from arrays that were overwritten in between."""
    inputs, stream = Inputs.make(), gpu0.stream()
    arrays, positions, out = (
        inputs.on(gpu0),
        gpu0.to_device(chain(40)),
        gpu0.to_device(np.zeros((8, 4, 128), np.float32)),
    )
    plan = hk.plan(request(gpu0, CAPACITY), gpu0) if through_a_plan else None
    with gpu0.capture(stream) as graph:
        if plan is not None:
            plan.run(*arrays, positions, out, stream=stream)
        else:
            hk.attend(*arrays, positions, ctx=40, out=out, stream=stream, capturing=True)
    assert not gpu0.to_host(out).any()
    assert graph.entries == ["attention_flash_q8_0_tile_batched_d4", "attention_flash_reduce_batched_d4"]
    del plan
    gc.collect()
    for seed, ctx in enumerate((40, 129, CAPACITY, 8)):
        now = Inputs.make(seed=seed)
        for array, values in zip((*arrays, positions), (now.q, now.k_cache, now.v_cache, chain(ctx)), strict=True):
            gpu0.write(array, values)
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(gpu0.to_host(out), now.wanted(chain(ctx)))


def test_what_a_capture_allocates_lives_as_long_as_its_graph(gpu0: GpuDevice, stub: StandIn) -> None:
    inputs, stream, ctx = Inputs.make(), gpu0.stream(), 100
    arrays, positions = inputs.on(gpu0), gpu0.to_device(chain(ctx))
    with gpu0.capture(stream) as graph:
        out = hk.attend(*arrays, positions, ctx=ctx, stream=stream, capturing=True)
        address = out.pointer
        del out
    gc.collect()
    graph.launch(stream)
    kept = next(array for array in graph.keeps if isinstance(array, DeviceArray) and array.pointer == address)
    assert np.array_equal(gpu0.to_host(kept), inputs.wanted(chain(ctx)))
    del graph, kept
    gc.collect()
    assert stub.live()["executable graph"] == 0


def test_a_multirow_route_is_not_captured(gpu0: GpuDevice) -> None:
    inputs = Inputs.make(4200)
    with pytest.raises(NotAdmitted, match="capturing"):
        hk.attend(*inputs.on(gpu0), chain(4200), route="rows8", capturing=True)


@pytest.mark.parametrize("step", ["to_host", "to_device", "write", "synchronize", "capture"])
def test_a_copy_or_wait_in_a_capture_is_refused_before_it_can_spoil_it(step: str, gpu0: GpuDevice) -> None:
    inputs, stream = Inputs.make(), gpu0.stream()
    arrays, positions = inputs.on(gpu0), gpu0.to_device(chain(40))
    steps: dict[str, Callable[[], Any]] = {
        "to_host": lambda: gpu0.to_host(positions),
        "to_device": lambda: gpu0.to_device(chain(40)),
        "write": lambda: gpu0.write(positions, chain(40)),
        "synchronize": gpu0.synchronize,
        "capture": lambda: gpu0.capture(gpu0.stream()).__enter__(),
    }
    with gpu0.capture(stream) as graph:
        with pytest.raises(
            DeviceError, match=f"cannot be part of the graph that {gpu0.name} is capturing; do it before"
        ):
            steps[step]()
        out = hk.attend(*arrays, positions, ctx=40, stream=stream, capturing=True)
    graph.launch(stream)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(40)))


def test_the_default_stream_cannot_be_captured(gpu0: GpuDevice, stub: StandIn) -> None:
    with (
        pytest.raises(DeviceError, match=stub.failure("capture_begin", CAPTURE_UNSUPPORTED)),
        gpu0.capture(None),
    ):
        pass
    gpu0.synchronize()


# ---- refused before launch ------------------------------------------------------------------------------------------


def refusals(gpu0: GpuDevice, gpu1: GpuDevice) -> list[tuple[str, dict[str, Any]]]:
    """What is wrong with a call, and the argument that makes it so."""
    inputs, zero, one = Inputs.make(), gpu0.name, gpu1.name
    own, other = ((10, 2), (2, 10))[gpu0.driver.vendor == "cuda"]
    q, k_cache, _ = inputs.on(gpu0)
    elsewhere = inputs.on(gpu1)
    freed = gpu0.to_device(inputs.q)
    freed.buffer.free()
    strided = Interface(q, strides=(4 * HEADS * HEAD_DIM, 4 * HEAD_DIM, 8))
    return [
        (f"q has been freed: <DeviceArray float32[8, 4, 128] on {zero}>", {"q": freed}),
        (f"q is a numpy array in host memory; required: an array on {zero}", {"q": inputs.q}),
        (f"k_cache is a numpy array in host memory; required: an array on {zero}", {"k_cache": inputs.k_cache}),
        (f"v_cache is on {one}; required: {zero}", {"v_cache": elsewhere[2]}),
        (f"q is in {one}; required: {zero}", {"q": Interface(elsewhere[0])}),
        (f"q is in host memory; required: {zero}", {"q": Interface(q, data=(inputs.q.ctypes.data, False))}),
        (f"q is on DLPack device {own}:1; required: {zero}", {"q": Producer(elsewhere[0])}),
        (f"q is on DLPack device {other}:0; required: {zero}", {"q": Producer(q, device=(other, 0))}),
        ("q has strides", {"q": strided}),
        ("out is read-only; the kernel writes it", {"out": Interface(q, data=(q.pointer, True))}),
        (f"out is on {one}; required: {zero}", {"out": elsewhere[0]}),
        (f"the stream is one of {one}; required: one of {zero}", {"stream": gpu1.stream()}),
        (f"the stream is one of {one}; required: one of {zero}", {"stream": KEPT.handle}),
        (f"stream is 'fast'; required: a stream of {zero}", {"stream": "fast"}),
        ("k_cache has dtype f32", {"k_cache": q}),
        (f"q is a list; {zero} takes its own arrays", {"q": [1.0]}),
        ("q is at an address that is not a multiple of 4", {"q": Interface(q, data=(q.pointer + 2, False))}),
        ("k_cache has shape", {"k_cache": gpu0.section(k_cache, 0, (k_cache.size,))}),
    ]


KEPT = opened(1).stream()
"""Lives while its bare handle is passed around."""


def test_refused_before_launch(gpu0: GpuDevice, gpu1: GpuDevice, stub: StandIn) -> None:
    inputs = Inputs.make()
    q, k_cache, v_cache = inputs.on(gpu0)
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "positions": chain(40)}
    hk.attend(**good, device=gpu0)
    launches = stub.calls("launch")
    for wrong, change in refusals(gpu0, gpu1):
        with pytest.raises(InputError) as refused:
            hk.attend(**{**good, **change}, device=gpu0)
        assert wrong in str(refused.value)
    assert stub.calls("launch") == launches
