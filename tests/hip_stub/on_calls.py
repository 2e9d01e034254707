"""Calls, streams, graphs and foreign arrays on hip:0, and what is refused there before anything is launched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import opened
from hip_lab import Stub

import hipfire_kernels as hk
from hipfire_kernels.dispatch import AttendRequest, Decision
from hipfire_kernels.errors import DeviceError, InputError, NotAdmitted
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice

ROWS, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 4, 2, 128, 300
Array = np.ndarray[Any, Any]


@dataclass
class Inputs:
    """One verify-attention call on the host."""

    q: Array
    k_cache: Array
    v_cache: Array

    @classmethod
    def make(cls, capacity: int = CAPACITY, seed: int = 0) -> Inputs:
        rng = np.random.default_rng(seed)
        caches = (hk.quantize_q8_0(rng.standard_normal((capacity, KV_HEADS, HEAD_DIM), np.float32)) for _ in range(2))
        return cls(rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32), *caches)

    def on(self, device: GpuDevice) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        return tuple(device.to_device(array) for array in (self.q, self.k_cache, self.v_cache))

    def wanted(self, positions: Array) -> Array:
        out: Array = hk.attend(self.q, self.k_cache, self.v_cache, positions, device="host")
        return out


def chain(ctx: int) -> Array:
    return np.arange(ctx - ROWS, ctx, dtype=np.int32)


# ---- the device -----------------------------------------------------------------------------------------------------


def test_the_card_is_described(hip0: GpuDevice) -> None:
    assert hip0.describe() == {
        "device": "hip:0",
        "arch": "gfx1100:sramecc-:xnack-",
        "name": "Stub Radeon",
        "driver_api": 70200000,
        "multiprocessors": 48,
        "l2_bytes": 6 << 20,
        "memory_bytes": 24 << 30,
    }
    assert hip0.arch.name == "gfx1100"
    assert hip0.toolchain == "hiprtc"
    assert repr(hip0) == "<GpuDevice hip:0 gfx1100:sramecc-:xnack->"


def test_devices_by_name(hip0: GpuDevice) -> None:
    assert hk.devices() == ("hip:0", "hip:1", "hip:3", "host")
    assert hk.device("auto") is hip0
    assert hk.device("hip:0") is hip0
    assert hk.device("hip:00") is hip0
    with pytest.raises(DeviceError, match=r"hip:2 cannot be used, .* arch 'gfx906' is not known; known archs: gfx1100"):
        hk.device("hip:2")
    with pytest.raises(DeviceError, match="hip:4 does not exist; this machine has 4 HIP devices"):
        hk.device("hip:4")
    for wrong in ("hip", "hip:", "hip:-1", "hip:0x1", "HIP:0", "rocm:0", ""):
        with pytest.raises(InputError, match="is not known; required: host, hip:N, cuda:N or auto"):
            hk.device(wrong)


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctx", [8, 129, CAPACITY])
def test_attend(ctx: int, hip0: GpuDevice) -> None:
    inputs = Inputs.make()
    for positions in (chain(ctx), hip0.to_device(chain(ctx))):
        got = hk.attend(*inputs.on(hip0), positions)
        assert isinstance(got, DeviceArray)
        assert np.array_equal(hip0.to_host(got), inputs.wanted(chain(ctx)))


def test_attend_over_a_tree(hip0: GpuDevice) -> None:
    inputs, rng = Inputs.make(), np.random.default_rng(1)
    bias = np.where(np.tri(ROWS, dtype=bool), rng.standard_normal((ROWS, ROWS), np.float32), -np.inf).astype(np.float32)
    positions = chain(200)
    got = hk.attend(*inputs.on(hip0), positions, tree_bias=hip0.to_device(bias))
    want = hk.attend(inputs.q, inputs.k_cache, inputs.v_cache, positions, tree_bias=bias)
    assert np.array_equal(hip0.to_host(got), want)


@pytest.mark.parametrize("sliding", [{}, {"window": 20}, {"causal": True}])
def test_draft_attend(sliding: dict[str, Any], hip0: GpuDevice) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32)
    k, v = (rng.standard_normal((50, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    got = hk.draft_attend(*map(hip0.to_device, (q, k, v)), **sliding)
    assert np.array_equal(hip0.to_host(got), hk.draft_attend(q, k, v, **sliding))


def test_kv_write(hip0: GpuDevice) -> None:
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((5, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    caches = [np.full((40, KV_HEADS, HEAD_DIM // 32, 34), 7, np.uint8) for _ in range(2)]
    positions = np.array([3, 39, 0, 17, 4], np.int32)
    there = [hip0.to_device(cache) for cache in caches]
    hk.kv_write(hip0.to_device(k), hip0.to_device(v), *there, positions)
    hk.kv_write(k, v, *caches, positions)
    for got, want in zip(there, caches, strict=True):
        assert np.array_equal(hip0.to_host(got), want)


def test_multirow_needs_evidence_for_the_exact_arch(hip0: GpuDevice, hip1: GpuDevice) -> None:
    """gfx1100 has evidence for rows8 above 4096 keys; gfx1201 runs the established route and says why."""
    inputs, positions = Inputs.make(4200), chain(4200)
    seen: list[Decision] = []
    got = [where.to_host(hk.attend(*inputs.on(where), positions, on_decision=seen.append)) for where in (hip0, hip1)]
    assert [decision.route for decision in seen] == ["rows8", "tile_batched"]
    assert [check.name for check in seen[1].rejected["rows8"] if not check.ok] == ["evidence"]
    want = inputs.wanted(positions)
    assert np.array_equal(got[0], want)
    assert np.array_equal(got[1], want)
    with pytest.raises(NotAdmitted, match="evidence: None, required a parity and speed record of rows8"):
        hk.attend(*inputs.on(hip1), positions, route="rows8")


def test_any_thread_may_call_whatever_its_current_device(hip0: GpuDevice, hip1: GpuDevice) -> None:
    from hip import hip

    inputs, positions = Inputs.make(), hip0.to_device(chain(200))
    arrays, outs = inputs.on(hip0), [hip0.empty((ROWS, HEADS, HEAD_DIM), np.float32) for _ in range(4)]

    def call(out: DeviceArray) -> None:
        plan = hk.plan(request(CAPACITY), hip0)
        hip.hipSetDevice(1)
        plan.run(*arrays, positions, out)

    with ThreadPoolExecutor(len(outs)) as pool:
        list(pool.map(call, outs))
    for out in outs:
        assert np.array_equal(hip0.to_host(out), inputs.wanted(chain(200)))


# ---- streams and events ---------------------------------------------------------------------------------------------


def test_streams_and_events(hip0: GpuDevice, stub: Stub) -> None:
    inputs, positions = Inputs.make(), chain(200)
    before = stub.live()
    stream, start, end = hip0.stream(), hip0.event(), hip0.event()
    start.record(stream)
    by_handle = hk.attend(*inputs.on(hip0), positions, stream=stream.handle)
    by_object = hk.attend(*inputs.on(hip0), positions, stream=stream)
    by_protocol = hk.attend(*inputs.on(hip0), positions, stream=Foreign(stream.handle))
    end.record(stream)
    stream.synchronize()
    assert end.ms_since(start) > 0
    for got in (by_handle, by_object, by_protocol):
        assert np.array_equal(hip0.to_host(got), inputs.wanted(positions))
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


def test_time_between_events_that_were_not_recorded_is_an_error(hip0: GpuDevice) -> None:
    with pytest.raises(DeviceError, match=r"hipEventElapsedTime failed: hipErrorInvalidHandle \(400\)"):
        hip0.event().record().ms_since(hip0.event())


# ---- graphs ---------------------------------------------------------------------------------------------------------


def request(ctx: int) -> AttendRequest:
    return AttendRequest(
        arch="gfx1100", kv_format="q8_0", head_dim=HEAD_DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, rows=ROWS,
        logical_ctx=ctx, layout="chain", capturing=True, recording=False,
    )  # fmt: skip


@pytest.mark.parametrize("through_a_plan", [False, True])
def test_a_captured_call_follows_the_context(through_a_plan: bool, hip0: GpuDevice, stub: Stub) -> None:
    """Captured at one context and replayed at others, from arrays that were overwritten in between."""
    inputs, stream = Inputs.make(), hip0.stream()
    arrays, positions, out = (
        inputs.on(hip0),
        hip0.to_device(chain(40)),
        hip0.to_device(np.zeros((8, 4, 128), np.float32)),
    )
    plan = hk.plan(request(CAPACITY), hip0) if through_a_plan else None
    with hip0.capture(stream) as graph:
        if plan is not None:
            plan.run(*arrays, positions, out, stream=stream)
        else:
            hk.attend(*arrays, positions, ctx=40, out=out, stream=stream, capturing=True)
    assert not hip0.to_host(out).any()
    assert graph.entries == ["attention_flash_q8_0_tile_batched_d4", "attention_flash_reduce_batched_d4"]
    del plan
    gc.collect()
    for seed, ctx in enumerate((40, 129, CAPACITY, 8)):
        now = Inputs.make(seed=seed)
        for array, values in zip((*arrays, positions), (now.q, now.k_cache, now.v_cache, chain(ctx)), strict=True):
            hip0.write(array, values)
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(hip0.to_host(out), now.wanted(chain(ctx)))


def test_what_a_capture_allocates_lives_as_long_as_its_graph(hip0: GpuDevice, stub: Stub) -> None:
    inputs, stream, ctx = Inputs.make(), hip0.stream(), 100
    arrays, positions = inputs.on(hip0), hip0.to_device(chain(ctx))
    with hip0.capture(stream) as graph:
        out = hk.attend(*arrays, positions, ctx=ctx, stream=stream, capturing=True)
        address = out.pointer
        del out
    gc.collect()
    graph.launch(stream)
    kept = next(array for array in graph.keeps if isinstance(array, DeviceArray) and array.pointer == address)
    assert np.array_equal(hip0.to_host(kept), inputs.wanted(chain(ctx)))
    del graph, kept
    gc.collect()
    assert stub.live()["executable graph"] == 0


def test_a_multirow_route_is_not_captured(hip0: GpuDevice) -> None:
    inputs = Inputs.make(4200)
    with pytest.raises(NotAdmitted, match="capturing"):
        hk.attend(*inputs.on(hip0), chain(4200), route="rows8", capturing=True)


@pytest.mark.parametrize("step", ["to_host", "to_device", "write", "synchronize", "capture"])
def test_a_copy_or_wait_in_a_capture_is_refused_before_it_can_spoil_it(step: str, hip0: GpuDevice) -> None:
    inputs, stream = Inputs.make(), hip0.stream()
    arrays, positions = inputs.on(hip0), hip0.to_device(chain(40))
    steps: dict[str, Callable[[], Any]] = {
        "to_host": lambda: hip0.to_host(positions),
        "to_device": lambda: hip0.to_device(chain(40)),
        "write": lambda: hip0.write(positions, chain(40)),
        "synchronize": hip0.synchronize,
        "capture": lambda: hip0.capture(hip0.stream()).__enter__(),
    }
    with hip0.capture(stream) as graph:
        with pytest.raises(DeviceError, match="cannot be part of the graph that hip:0 is capturing; do it before"):
            steps[step]()
        out = hk.attend(*arrays, positions, ctx=40, stream=stream, capturing=True)
    graph.launch(stream)
    assert np.array_equal(hip0.to_host(out), inputs.wanted(chain(40)))


def test_the_default_stream_cannot_be_captured(hip0: GpuDevice) -> None:
    with (
        pytest.raises(DeviceError, match=r"hipStreamBeginCapture failed: hipErrorStreamCaptureUnsupported \(900\)"),
        hip0.capture(None),
    ):
        pass
    hip0.synchronize()


# ---- foreign arrays -------------------------------------------------------------------------------------------------


class Interface:
    """Another library's array, by `__cuda_array_interface__`."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self._keep = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


class Producer:
    """Another library's array, by DLPack. Notes the stream it is asked to be ready on."""

    def __init__(self, array: DeviceArray, device: tuple[int, int] | None = None) -> None:
        self._array, self._device = array, device or array.__dlpack_device__()
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        self.asked.append(stream)
        return self._array.__dlpack__(stream=stream)


@pytest.mark.parametrize("kind", [Interface, Producer])
def test_foreign_arrays_are_read_in_place(kind: type[Any], hip0: GpuDevice, stub: Stub) -> None:
    inputs, positions = Inputs.make(), chain(77)
    own = inputs.on(hip0)
    out = hip0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    made = stub.live()["memory"]
    hk.attend(*map(kind, own), positions, out=kind(out), device=hip0)
    hk.attend(*map(kind, own), positions, out=kind(out), device=hip0)
    assert np.array_equal(hip0.to_host(out), inputs.wanted(positions))
    assert np.array_equal(hip0.to_host(kind(own[0])), inputs.q)
    gc.collect()
    assert stub.live()["memory"] <= made + 1  # the workspace of the cached plan
    assert not dlpack._alive


def test_dlpack_finds_the_device_and_asks_for_the_default_stream(hip0: GpuDevice) -> None:
    inputs, positions = Inputs.make(), chain(77)
    producers = [Producer(array) for array in inputs.on(hip0)]
    assert producers[0].__dlpack_device__() == (10, 0)
    out = hip0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    hk.attend(*producers, positions, out=out)
    assert np.array_equal(hip0.to_host(out), inputs.wanted(positions))
    assert {stream for producer in producers for stream in producer.asked} == {0}


def test_the_launchs_stream_waits_for_the_producers(hip0: GpuDevice, stub: Stub) -> None:
    inputs, producer, mine = Inputs.make(), hip0.stream(), hip0.stream()
    q, k_cache, v_cache = inputs.on(hip0)
    call = {"k_cache": k_cache, "v_cache": v_cache, "positions": hip0.to_device(chain(100)), "ctx": 100, "device": hip0}
    for stream, queued_on, waits in [
        (None, producer.handle, 1),  # the default stream waits for the producer's
        (mine, producer.handle, 1),  # and so does the caller's
        (mine, 1, 1),  # 1 is the legacy default stream, which is not the caller's
        (None, 1, 0),
        (producer, producer.handle, 0),
    ]:
        before = stub.calls("hipStreamWaitEvent")
        hk.attend(Interface(q, stream=queued_on), **call, out=hip0.empty(q.shape, np.float32), stream=stream)
        assert stub.calls("hipStreamWaitEvent") == before + waits, (stream, queued_on)


# ---- refused before launch ------------------------------------------------------------------------------------------


def refusals(hip0: GpuDevice, hip1: GpuDevice) -> list[tuple[str, dict[str, Any]]]:
    """What is wrong with a call, and the argument that makes it so."""
    inputs = Inputs.make()
    q, k_cache, _ = inputs.on(hip0)
    elsewhere = inputs.on(hip1)
    freed = hip0.to_device(inputs.q)
    freed.buffer.free()
    strided = Interface(q, strides=(4 * HEADS * HEAD_DIM, 4 * HEAD_DIM, 8))
    return [
        ("q has been freed: <DeviceArray float32[8, 4, 128] on hip:0>", {"q": freed}),
        ("q is a numpy array in host memory; required: an array on hip:0", {"q": inputs.q}),
        ("k_cache is a numpy array in host memory; required: an array on hip:0", {"k_cache": inputs.k_cache}),
        ("v_cache is on hip:1; required: hip:0", {"v_cache": elsewhere[2]}),
        ("q is in hip:1; required: hip:0", {"q": Interface(elsewhere[0])}),
        ("q is in host memory; required: hip:0", {"q": Interface(q, data=(inputs.q.ctypes.data, False))}),
        ("q is on DLPack device 10:1; required: hip:0", {"q": Producer(elsewhere[0])}),
        ("q is on DLPack device 2:0; required: hip:0", {"q": Producer(q, device=(2, 0))}),
        ("q has strides", {"q": strided}),
        ("out is read-only; the kernel writes it", {"out": Interface(q, data=(q.pointer, True))}),
        ("out is on hip:1; required: hip:0", {"out": elsewhere[0]}),
        ("the stream is one of hip:1; required: one of hip:0", {"stream": hip1.stream()}),
        ("the stream is one of hip:1; required: one of hip:0", {"stream": KEPT.handle}),
        ("stream is 'fast'; required: a stream of hip:0", {"stream": "fast"}),
        ("k_cache has dtype f32", {"k_cache": q}),
        ("q is a list; hip:0 takes its own arrays", {"q": [1.0]}),
        ("q is at an address that is not a multiple of 4", {"q": Interface(q, data=(q.pointer + 2, False))}),
        ("k_cache has shape", {"k_cache": hip0.section(k_cache, 0, (k_cache.size,))}),
    ]


KEPT = opened("hip:1").stream()
"""Lives while its bare handle is passed around."""


def test_refused_before_launch(hip0: GpuDevice, hip1: GpuDevice, stub: Stub) -> None:
    inputs = Inputs.make()
    q, k_cache, v_cache = inputs.on(hip0)
    good = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "positions": chain(40)}
    hk.attend(**good, device=hip0)
    launches = stub.calls("hipModuleLaunchKernel")
    for wrong, change in refusals(hip0, hip1):
        with pytest.raises(InputError) as refused:
            hk.attend(**{**good, **change}, device=hip0)
        assert wrong in str(refused.value)
    assert stub.calls("hipModuleLaunchKernel") == launches


def test_the_caller_of_the_runtime_is_not_blamed_for_our_errors(hip0: GpuDevice) -> None:
    from hip import hip

    hip0.driver.owner(id(hip0))  # asks about memory that HIP does not know
    with pytest.raises(DeviceError, match="hipErrorInvalidValue"):
        hip0.driver.copy_out(0, 0, 4)
    Stub().complaints()
    assert hip.hipGetLastError() == (hip.hipError_t.hipSuccess,)
