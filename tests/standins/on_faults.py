"""Whatever fails in the driver: a clear error where it happens, nothing left behind, and a device that works on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import opened
from standin_lab import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    LAUNCH_FAILURE,
    NO_BINARY,
    NOT_FOUND,
    OUT_OF_MEMORY,
    StandIn,
)

import hipfire_kernels as hk
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.errors import CompileError, DeviceError
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.attention import TilePlan, check_verify
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.gpu import GpuDevice

POSITIONS = np.arange(12, 20, dtype=np.int32)
TILE = hk.families()["attention_flash_q8_0_tile_batched"]


def host_inputs() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    caches = (hk.quantize_q8_0(rng.standard_normal((20, 2, 128), np.float32)) for _ in range(2))
    return (rng.standard_normal((8, 4, 128), np.float32), *caches)


def attend_once(device: GpuDevice, stream: Any = None) -> Any:
    """Everything from host arrays to host result, with nothing kept."""
    q, k_cache, v_cache, positions = map(device.to_device, (*host_inputs(), POSITIONS))
    out = device.empty(q.shape, np.float32)
    plan = TilePlan(TILE.variant(head_dim=128, mask="causal"), device, check_verify(device, q, k_cache, v_cache), 20)
    plan.run(q, k_cache, v_cache, positions, out, stream=stream)
    return device.to_host(out)


def works(device: GpuDevice) -> bool:
    return np.array_equal(attend_once(device), hk.attend(*host_inputs(), POSITIONS))


def left_behind(stub: StandIn, before: dict[str, int]) -> dict[str, int]:
    gc.collect()
    return {kind: count - before[kind] for kind, count in stub.live().items() if count != before[kind]}


@pytest.fixture
def before(gpu0: GpuDevice, stub: StandIn) -> dict[str, int]:
    """What lives once the kernels are loaded."""
    assert works(gpu0)
    gc.collect()
    return stub.live()


def test_out_of_memory_at_every_allocation(gpu0: GpuDevice, stub: StandIn, before: dict[str, int]) -> None:
    allocations = stub.calls("malloc")
    attend_once(gpu0)
    allocations = stub.calls("malloc") - allocations
    assert allocations == 6
    for nth in range(allocations):
        stub.fail("malloc", OUT_OF_MEMORY, after=nth)
        with pytest.raises(DeviceError, match=stub.failure("malloc", OUT_OF_MEMORY) + ": free arrays"):
            attend_once(gpu0)
        assert left_behind(stub, before) == {}
        assert works(gpu0)


@pytest.mark.parametrize("nth", [0, 1])
def test_launch_failure(nth: int, gpu0: GpuDevice, stub: StandIn, before: dict[str, int]) -> None:
    entry = ("attention_flash_q8_0_tile_batched_d4", "attention_flash_reduce_batched_d4")[nth]
    stub.fail("launch", LAUNCH_FAILURE, after=nth)
    with pytest.raises(DeviceError, match=rf"{entry}, grid .*: {stub.failure('launch', LAUNCH_FAILURE)}"):
        attend_once(gpu0)
    assert left_behind(stub, before) == {}
    assert works(gpu0)


STEPS: dict[str, Callable[[GpuDevice], Any]] = {
    "copy_in": attend_once,
    "copy_out": attend_once,
    "activate": attend_once,
    "stream_create": lambda device: device.stream(),
    "stream_synchronize": lambda device: device.stream().synchronize(),
    "stream_device": lambda device: device.stream_handle(3),
    "event_create": lambda device: device.event(),
    "event_record": lambda device: device.event().record(),
    "event_synchronize": lambda device: device.event().record().synchronize(),
    "event_elapsed": lambda device: device.event().record().ms_since(device.event().record()),
    "stream_wait": lambda device: device.order_after(0, 2),
    "synchronize": lambda device: device.synchronize(),
}


@pytest.mark.parametrize("call", STEPS)
def test_any_call_can_fail(call: str, gpu0: GpuDevice, stub: StandIn, before: dict[str, int]) -> None:
    stub.fail(call, LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=stub.failure(call, LAUNCH_FAILURE)):
        STEPS[call](gpu0)
    assert left_behind(stub, before) == {}
    assert works(gpu0)


def test_a_fault_found_by_waiting_names_the_launches_since_the_last_wait(gpu0: GpuDevice, stub: StandIn) -> None:
    gpu0.synchronize()
    q, k_cache, v_cache, positions = map(gpu0.to_device, (*host_inputs(), POSITIONS))
    stream = gpu0.stream()
    with gpu0.capture(stream) as graph:
        hk.attend(q, k_cache, v_cache, positions, ctx=20, stream=stream, capturing=True)
    out = gpu0.empty(q.shape, np.float32)
    hk.draft_attend(q, q, q, out=out)
    graph.launch(stream)
    stub.fail("synchronize", LAUNCH_FAILURE)
    names = (
        "attention_dflash_f32_d4, a graph of attention_flash_q8_0_tile_batched_d4, attention_flash_reduce_batched_d4"
    )
    with pytest.raises(DeviceError, match=rf"\(719\)\. Launched on {gpu0.name} since it was last waited for: {names}$"):
        gpu0.to_host(out)
    stub.fail("synchronize", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match="since it was last waited for: nothing"):
        gpu0.synchronize()
    assert works(gpu0)


def test_a_device_that_did_not_open_is_tried_again(stub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_opened", {})
    stub.fail("describe", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=rf"{stub.face.statuses[LAUNCH_FAILURE]} \(719\)"):
        opened(0)
    assert opened(0) is opened(0)


# ---- modules --------------------------------------------------------------------------------------------------------


def fresh() -> GpuDevice:
    """A device object that has loaded nothing yet."""
    return GpuDevice(opened(0).driver, 0)


@pytest.mark.parametrize(("call", "status"), [("module_load", NO_BINARY), ("module_function", NOT_FOUND)])
def test_module_failure(call: str, status: int, stub: StandIn, before: dict[str, int]) -> None:
    device = fresh()
    stub.fail(call, status)
    with pytest.raises(DeviceError, match=stub.failure(call, status)):
        attend_once(device)
    assert left_behind(stub, before) == {}
    assert works(device)


# ---- compiling ------------------------------------------------------------------------------------------------------


def write_some(device: GpuDevice, variant: Variant) -> None:
    x, cache = device.to_device(np.ones((1, 1, 32), np.float32)), device.to_device(np.zeros((1, 1, 1, 34), np.uint8))
    launch(variant, device, x=x, cache=cache, positions=device.to_device(np.zeros(1, np.int32)))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("WRONG", r"(?s){toolchain} did not compile the source for {arch} .* kernel:7: error: no such thing"),
        ("", r"error: not prepared: kv_cache_write_q8_0_batched for {arch}"),
    ],
)
def test_compile_failure(
    word: str, message: str, gpu0: GpuDevice, stub: StandIn, before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = message.format(toolchain=gpu0.toolchain, arch=gpu0.arch.name)
    variant = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=False)
    launches = stub.calls("launch")
    monkeypatch.setenv("STANDIN_COMPILE", word or "-")
    with pytest.raises(CompileError, match=said) as refused:
        write_some(gpu0, variant)
    assert refused.value.source == variant.source(gpu0.arch.name)
    del refused  # and with it the frames that hold the arrays
    assert stub.calls("launch") == launches
    assert left_behind(stub, before) == {}
    monkeypatch.delenv("STANDIN_COMPILE")
    assert works(gpu0)


# ---- captures -------------------------------------------------------------------------------------------------------


def capture_and_replay(device: GpuDevice) -> Any:
    q, k_cache, v_cache, positions = map(device.to_device, (*host_inputs(), POSITIONS))
    out = device.empty(q.shape, np.float32)
    plan = TilePlan(TILE.variant(head_dim=128, mask="causal"), device, check_verify(device, q, k_cache, v_cache), 20)
    stream = device.stream()
    with device.capture(stream) as graph:
        plan.run(q, k_cache, v_cache, positions, out, stream=stream)
    graph.launch(stream)
    return device.to_host(out)


CAPTURE_CALLS = (
    "capture_begin",
    "launch",
    "capture_end",
    "instantiate",
    "graph_launch",
)


@pytest.mark.parametrize("call", CAPTURE_CALLS)
def test_capture_failure(call: str, gpu0: GpuDevice, stub: StandIn, before: dict[str, int]) -> None:
    stub.fail(call, CAPTURE_INVALIDATED)
    with pytest.raises(DeviceError, match=stub.failure(call, CAPTURE_INVALIDATED)):
        capture_and_replay(gpu0)
    assert left_behind(stub, before) == {}
    assert np.array_equal(capture_and_replay(gpu0), hk.attend(*host_inputs(), POSITIONS))


def test_a_capture_left_by_an_exception_is_dropped(gpu0: GpuDevice, stub: StandIn, before: dict[str, int]) -> None:
    stream = gpu0.stream()
    with pytest.raises(KeyError), gpu0.capture(stream) as graph:
        raise KeyError
    with pytest.raises(DeviceError, match="nothing to replay"):
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(attend_once(gpu0, stream), hk.attend(*host_inputs(), POSITIONS))
    del stream, graph
    assert left_behind(stub, before) == {}


def test_a_capture_spoiled_from_outside_is_an_error_at_its_end(
    gpu0: GpuDevice, stub: StandIn, before: dict[str, int]
) -> None:
    """Another library waits for the device, which no driver allows while a stream is being captured."""
    stream = gpu0.stream()
    with (
        pytest.raises(DeviceError, match=stub.failure("capture_end", CAPTURE_INVALIDATED)),
        gpu0.capture(stream),
        pytest.raises(DeviceError, match=stub.failure("synchronize", CAPTURE_UNSUPPORTED)),
    ):
        gpu0.driver.synchronize()
    assert stub.complaints() == [f"{stub.face.calls['synchronize']}: a stream is being captured"]
    stream.synchronize()
    del stream
    assert left_behind(stub, before) == {}
    assert works(gpu0)


# ---- the end of a device's things -----------------------------------------------------------------------------------


def test_a_failing_free_is_not_raised_from_the_garbage_collector(gpu0: GpuDevice, stub: StandIn) -> None:
    array = gpu0.to_device(POSITIONS)
    stub.fail("free", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=stub.failure("free", LAUNCH_FAILURE)):
        array.buffer.free()
    array = gpu0.to_device(POSITIONS)
    stub.fail("free", LAUNCH_FAILURE)
    del array
    gc.collect()
    assert works(gpu0)
