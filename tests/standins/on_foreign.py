"""Another library's arrays on a device: every form of them, the streams that they come from, and their ends."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from foreign_lab import BAD, GOOD, OFFSET, SHAPE, Described, described
from inputs import HEAD_DIM, HEADS, ROWS, Array, Inputs, chain
from standin_lab import StandIn

import hipfire_kernels as hk
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice


class Interface:
    """Another library's array, by `__cuda_array_interface__`. A change to None of a key that is not "stream" or
    "strides" takes it away."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self._keep = array
        said = {**array.__cuda_array_interface__, **changes}
        gone = [key for key, value in changes.items() if value is None and key not in ("stream", "strides", "mask")]
        self.__cuda_array_interface__ = {key: value for key, value in said.items() if key not in gone}


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
def test_foreign_arrays_are_read_in_place(kind: type[Any], gpu0: GpuDevice, stub: StandIn) -> None:
    inputs, positions = Inputs.make(), chain(77)
    own = inputs.on(gpu0)
    out = gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    made = stub.live()["memory"]
    hk.attend(*map(kind, own), positions, out=kind(out), device=gpu0)
    hk.attend(*map(kind, own), positions, out=kind(out), device=gpu0)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(positions))
    assert np.array_equal(gpu0.to_host(kind(own[0])), inputs.q)
    gc.collect()
    assert stub.live()["memory"] <= made + 1  # the workspace of the cached plan
    assert not dlpack._alive


# ---- what they say of themselves ------------------------------------------------------------------------------------


@pytest.fixture
def memory(gpu0: GpuDevice) -> tuple[DeviceArray, int, Array]:
    """Memory on the device, address and values of the array that begins OFFSET bytes in."""
    values = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    held = gpu0.to_device(values)
    return held, held.pointer + OFFSET, values[OFFSET // 4 : OFFSET // 4 + 24].reshape(SHAPE)


@pytest.mark.parametrize("what", GOOD)
def test_dlpack_in_every_form(what: str, memory: tuple[DeviceArray, int, Array], gpu0: GpuDevice) -> None:
    held, start, values = memory
    said = GOOD[what]
    array = described(start, said, device=held.__dlpack_device__(), keep=held)
    want = np.empty(said["shape"], np.float32) if "pointer" in said else values.reshape(said.get("shape", SHAPE))
    assert gpu0.view("x", array).pointer == said.get("pointer", start)
    assert np.array_equal(gpu0.to_host(array), want)
    assert gpu0.view("x", array).shape == want.shape
    assert gpu0.view("x", array).writable == (said.get("flags") != 1)


@pytest.mark.parametrize("what", BAD)
def test_dlpack_that_cannot_be_read(what: str, memory: tuple[DeviceArray, int, Array], gpu0: GpuDevice) -> None:
    held, start, _ = memory
    said, message = BAD[what]
    with pytest.raises(InputError, match=message):
        gpu0.view("x", described(start, said, device=held.__dlpack_device__(), keep=held))


def test_a_read_only_producer_is_no_output(gpu0: GpuDevice) -> None:
    inputs, out = Inputs.make(), gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    how: dict[str, Any] = {"device": out.__dlpack_device__(), "version": (1, 0), "keep": out}
    with pytest.raises(InputError, match="out is read-only; the kernel writes it"):
        hk.attend(*inputs.on(gpu0), chain(77), out=Described(out.pointer, out.shape, flags=1, **how))
    hk.attend(*inputs.on(gpu0), chain(77), out=Described(out.pointer, out.shape, **how))
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(77)))


GOOD_INTERFACES: dict[str, dict[str, Any]] = {
    "no strides": {},
    "strides": {"strides": (24, 4)},
    "an extent of 1": {"shape": (4, 1, 6), "strides": (24, 7, 4)},
    "version 2": {"version": 2, "stream": None},
    "read-only": {"data": "read-only"},
    "no element": {"shape": (0, 6), "data": (0, False), "strides": (1, 1)},
    "no mask": {"mask": None},
}
BAD_INTERFACES: dict[str, tuple[dict[str, Any], str]] = {
    "transposed": ({"strides": (4, 16)}, r"x has strides \(4, 16\) for shape \(4, 6\); required: C-contiguous"),
    "broadcast": ({"strides": (0, 4)}, r"x has strides \(0, 4\)"),
    "strides of another rank": ({"strides": (4,)}, r"x has strides \(4,\) for shape \(4, 6\)"),
    "a mask": ({"mask": object()}, "x has a mask; required: an array in which every element counts"),
    "no data": ({"data": None}, r"x has a __cuda_array_interface__ that cannot be read: KeyError\('data'\)"),
    "no type": ({"typestr": "<q9"}, r"x has a __cuda_array_interface__ that cannot be read: TypeError"),
    "no shape": ({"shape": 5}, r"x has a __cuda_array_interface__ that cannot be read: TypeError"),
}


@pytest.mark.parametrize("what", GOOD_INTERFACES)
def test_interfaces_in_every_form(what: str, memory: tuple[DeviceArray, int, Array], gpu0: GpuDevice) -> None:
    held, start, values = memory
    said = GOOD_INTERFACES[what]
    read_only = said.get("data") == "read-only"
    data = said["data"] if "data" in said and not read_only else (start, read_only)
    array = Interface(held, **{"shape": SHAPE, **said, "data": data})
    want = values.reshape(said.get("shape", SHAPE)) if data[0] else np.empty(said["shape"], np.float32)
    assert np.array_equal(gpu0.to_host(array), want)
    assert gpu0.view("x", array).pointer == data[0]
    assert gpu0.view("x", array).writable is not read_only


@pytest.mark.parametrize("what", BAD_INTERFACES)
def test_interfaces_that_cannot_be_read(what: str, memory: tuple[DeviceArray, int, Array], gpu0: GpuDevice) -> None:
    held, start, _ = memory
    said, message = BAD_INTERFACES[what]
    with pytest.raises(InputError, match=message):
        gpu0.view("x", Interface(held, **{"shape": SHAPE, "data": (start, False), **said}))


def test_an_address_that_does_not_fit_is_refused_if_anything_is_there(
    memory: tuple[DeviceArray, int, Array], gpu0: GpuDevice
) -> None:
    held, start, _ = memory
    for shape, legal in ((SHAPE, False), ((0, 6), True)):
        for array in (
            Interface(held, shape=shape, data=(start + 2, False)),
            Described(start + 2, shape, device=held.__dlpack_device__()),
        ):
            if legal:
                assert gpu0.view("x", array).shape == shape
            else:
                with pytest.raises(InputError, match="x is at an address that is not a multiple of 4, which f32 needs"):
                    gpu0.view("x", array)


@pytest.mark.parametrize("typestr", [">f4", "|V4", "<f8"])
def test_an_interface_of_a_dtype_that_no_kernel_takes(typestr: str, gpu0: GpuDevice) -> None:
    q, k_cache, v_cache = Inputs.make().on(gpu0)
    with pytest.raises(InputError, match=r"q has dtype .*; required: f32"):
        hk.attend(Interface(q, typestr=typestr), k_cache, v_cache, chain(40), device=gpu0)


def test_what_is_handed_out_is_read_by_the_rules(gpu0: GpuDevice) -> None:
    """As strict a consumer as there is: strides are there, and nothing but the memory itself is handed out."""
    whole = gpu0.to_device(np.arange(48, dtype=np.int32))
    array = gpu0.section(whole, 16, (2, 3, 4))
    found = dlpack.peek("x", array)
    assert found == dlpack.Peek(whole.pointer + 64, (2, 3, 4), (12, 4, 1), np.dtype(np.int32), True)
    assert array.__cuda_array_interface__["data"] == (whole.pointer + 64, False)
    for how in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="is handed out where it is, without a copy"):
            array.__dlpack__(**how)
    array.__dlpack__(dl_device=array.__dlpack_device__(), copy=False, max_version=(1, 0))


# ---- the streams that they come from --------------------------------------------------------------------------------


def test_dlpack_finds_the_device_and_asks_for_the_default_stream(gpu0: GpuDevice) -> None:
    inputs, positions = Inputs.make(), chain(77)
    producers = [Producer(array) for array in inputs.on(gpu0)]
    kind, default = {"hip": (10, 0), "cuda": (2, 1)}[gpu0.driver.vendor]
    assert producers[0].__dlpack_device__() == (kind, 0)
    out = gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    hk.attend(*producers, positions, out=out)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(positions))
    assert {stream for producer in producers for stream in producer.asked} == {default}


def test_the_launchs_stream_waits_for_the_producers(gpu0: GpuDevice, stub: StandIn) -> None:
    inputs, producer, mine = Inputs.make(), gpu0.stream(), gpu0.stream()
    q, k_cache, v_cache = inputs.on(gpu0)
    call = {"k_cache": k_cache, "v_cache": v_cache, "positions": gpu0.to_device(chain(100)), "ctx": 100, "device": gpu0}
    for stream, queued_on, waits in [
        (None, producer.handle, 1),  # the default stream waits for the producer's
        (mine, producer.handle, 1),  # and so does the caller's
        (mine, 1, 1),  # 1 is the legacy default stream, which is not the caller's
        (None, 1, 0),
        (producer, producer.handle, 0),
    ]:
        before = stub.calls("stream_wait")
        hk.attend(Interface(q, stream=queued_on), **call, out=gpu0.empty(q.shape, np.float32), stream=stream)
        assert stub.calls("stream_wait") == before + waits, (stream, queued_on)


def test_a_refused_call_leaves_no_stream_behind_to_wait_for(gpu0: GpuDevice) -> None:
    inputs, producer = Inputs.make(), gpu0.stream()
    q, k_cache, v_cache = inputs.on(gpu0)
    with pytest.raises(InputError, match="k_cache has dtype f32"):
        hk.attend(Interface(q, stream=producer.handle), q, v_cache, chain(100), device=gpu0)
    del producer
    gc.collect()
    got = hk.attend(q, k_cache, v_cache, chain(100))
    assert np.array_equal(gpu0.to_host(got), inputs.wanted(chain(100)))


@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_a_capture_waits_for_nothing_outside_it(kind: str, gpu0: GpuDevice) -> None:
    inputs, producer, stream = Inputs.make(), gpu0.stream(), gpu0.stream()
    own, positions = inputs.on(gpu0), gpu0.to_device(chain(100))
    out = gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    made = [Interface(array, stream=producer.handle) if kind == "interface" else Producer(array) for array in own]
    with gpu0.capture(stream) as graph:
        hk.attend(*made, positions, ctx=100, out=out, stream=stream, device=gpu0)
    graph.launch(stream)
    assert np.array_equal(gpu0.to_host(out), inputs.wanted(chain(100)))
    assert {stream for array in made for stream in getattr(array, "asked", [-1])} == {-1}
