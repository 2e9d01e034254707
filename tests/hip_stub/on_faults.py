"""Whatever fails in HIP: a clear error where it happens, nothing left behind, and a device that goes on working."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import opened
from hip_lab import CAPTURE_INVALIDATED, LAUNCH_FAILURE, NO_BINARY, OUT_OF_MEMORY, Stub

import hipfire_kernels as hk
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.errors import CompileError, DeviceError, ToolchainUnavailable
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


def left_behind(stub: Stub, before: dict[str, int]) -> dict[str, int]:
    gc.collect()
    return {kind: count - before[kind] for kind, count in stub.live().items() if count != before[kind]}


@pytest.fixture
def before(hip0: GpuDevice, stub: Stub) -> dict[str, int]:
    """What lives once the kernels are loaded."""
    assert works(hip0)
    gc.collect()
    return stub.live()


def test_out_of_memory_at_every_allocation(hip0: GpuDevice, stub: Stub, before: dict[str, int]) -> None:
    allocations = stub.calls("hipMalloc")
    attend_once(hip0)
    allocations = stub.calls("hipMalloc") - allocations
    assert allocations == 6
    for nth in range(allocations):
        stub.fail("hipMalloc", OUT_OF_MEMORY, after=nth)
        with pytest.raises(DeviceError, match=r"hipMalloc failed: hipErrorOutOfMemory \(2\): free arrays"):
            attend_once(hip0)
        assert left_behind(stub, before) == {}
        assert works(hip0)


@pytest.mark.parametrize("nth", [0, 1])
def test_launch_failure(nth: int, hip0: GpuDevice, stub: Stub, before: dict[str, int]) -> None:
    from hip import hip

    entry = ("attention_flash_q8_0_tile_batched_d4", "attention_flash_reduce_batched_d4")[nth]
    stub.fail("hipModuleLaunchKernel", LAUNCH_FAILURE, after=nth)
    failure = rf"{entry}, grid .*: hipModuleLaunchKernel failed: hipErrorLaunchFailure \(719\)"
    with pytest.raises(DeviceError, match=failure):
        attend_once(hip0)
    assert hip.hipGetLastError() == (hip.hipError_t.hipSuccess,)
    assert left_behind(stub, before) == {}
    assert works(hip0)


STEPS: dict[str, Callable[[GpuDevice], Any]] = {
    "hipMemcpyHtoD": attend_once,
    "hipMemcpyDtoH": attend_once,
    "hipSetDevice": attend_once,
    "hipStreamCreateWithFlags": lambda device: device.stream(),
    "hipStreamSynchronize": lambda device: device.stream().synchronize(),
    "hipStreamGetDevice": lambda device: device.stream_handle(3),
    "hipEventCreate": lambda device: device.event(),
    "hipEventRecord": lambda device: device.event().record(),
    "hipEventSynchronize": lambda device: device.event().record().synchronize(),
    "hipEventElapsedTime": lambda device: device.event().record().ms_since(device.event().record()),
    "hipStreamWaitEvent": lambda device: device.order_after(0, 2),
    "hipDeviceSynchronize": lambda device: device.synchronize(),
}


@pytest.mark.parametrize("call", STEPS)
def test_any_call_can_fail(call: str, hip0: GpuDevice, stub: Stub, before: dict[str, int]) -> None:
    stub.fail(call, LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=rf"{call} failed: hipErrorLaunchFailure \(719\)"):
        STEPS[call](hip0)
    assert left_behind(stub, before) == {}
    assert works(hip0)


def test_a_fault_found_by_waiting_names_the_launches_since_the_last_wait(hip0: GpuDevice, stub: Stub) -> None:
    hip0.synchronize()
    q, k_cache, v_cache, positions = map(hip0.to_device, (*host_inputs(), POSITIONS))
    stream = hip0.stream()
    with hip0.capture(stream) as graph:
        hk.attend(q, k_cache, v_cache, positions, ctx=20, stream=stream, capturing=True)
    out = hip0.empty(q.shape, np.float32)
    hk.draft_attend(q, q, q, out=out)
    graph.launch(stream)
    stub.fail("hipDeviceSynchronize", LAUNCH_FAILURE)
    names = (
        "attention_dflash_f32_d4, a graph of attention_flash_q8_0_tile_batched_d4, attention_flash_reduce_batched_d4"
    )
    with pytest.raises(DeviceError, match=rf"\(719\)\. Launched on hip:0 since it was last waited for: {names}$"):
        hip0.to_host(out)
    stub.fail("hipDeviceSynchronize", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match="since it was last waited for: nothing"):
        hip0.synchronize()
    assert works(hip0)


def test_a_device_that_did_not_open_is_tried_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_opened", {})
    stub.fail("hipGetDevicePropertiesR0600", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=r"hipGetDeviceProperties failed for hip:0: hipErrorLaunchFailure \(719\)"):
        hk.device("hip:0")
    assert hk.device("hip:0") is hk.device("hip:0")


# ---- modules --------------------------------------------------------------------------------------------------------


def fresh() -> GpuDevice:
    """A device object that has loaded nothing yet."""
    return GpuDevice(opened("hip:0").driver, 0)


@pytest.mark.parametrize(("call", "status"), [("hipModuleLoadData", NO_BINARY), ("hipModuleGetFunction", 500)])
def test_module_failure(call: str, status: int, stub: Stub, before: dict[str, int]) -> None:
    device = fresh()
    stub.fail(call, status)
    with pytest.raises(DeviceError, match=f"{call} failed"):
        attend_once(device)
    assert left_behind(stub, before) == {}
    assert works(device)


def test_a_code_object_of_another_arch_is_refused_by_the_runtime(hip1: GpuDevice, stub: Stub) -> None:
    before = stub.live()
    artifact = hk.build(TILE.variant(head_dim=128, mask="causal"), "gfx1100", "hiprtc")
    with pytest.raises(DeviceError, match=r"hipErrorNoBinaryForGpu \(209\): the code object is for another arch"):
        hip1.load(artifact)
    assert left_behind(stub, before) == {}


# ---- compiling ------------------------------------------------------------------------------------------------------


def write_some(device: GpuDevice, variant: Variant) -> None:
    x, cache = device.to_device(np.ones((1, 1, 32), np.float32)), device.to_device(np.zeros((1, 1, 1, 34), np.uint8))
    launch(variant, device, x=x, cache=cache, positions=device.to_device(np.zeros(1, np.int32)))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("WRONG", r"hiprtc did not compile the source for gfx1100: kernel\.hip:7:9: error: no such thing"),
        ("ABORT", r"did not compile .*: the compiling process: ended by SIGABRT"),
        ("", r"error: not prepared: kv_cache_write_q8_0_batched for gfx1100"),
    ],
)
def test_compile_failure(
    word: str, message: str, hip0: GpuDevice, stub: Stub, before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=False)
    launches = stub.calls("hipModuleLaunchKernel")
    monkeypatch.setenv("HIP_STUB_COMPILE", word or "-")
    with pytest.raises(CompileError, match=message) as refused:
        write_some(hip0, variant)
    assert refused.value.source == variant.source("gfx1100")
    del refused  # and with it the frames that hold the arrays
    assert stub.calls("hipModuleLaunchKernel") == launches
    assert left_behind(stub, before) == {}
    monkeypatch.delenv("HIP_STUB_COMPILE")
    assert works(hip0)


def test_no_compiler_for_the_card_lists_why() -> None:
    with pytest.raises(ToolchainUnavailable) as refused:
        attend_once(opened("hip:3"))
    said = str(refused.value)
    assert "no compiler for gfx1101 can work here:\n  hiprtc: libhiprtc: it cannot compile an empty kernel" in said
    assert "SIGABRT" in said
    assert "ziglang" not in said  # it was not asked for, and would not be used


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
    "hipStreamBeginCapture",
    "hipModuleLaunchKernel",
    "hipStreamEndCapture",
    "hipGraphInstantiateWithFlags",
    "hipGraphLaunch",
)


@pytest.mark.parametrize("call", CAPTURE_CALLS)
def test_capture_failure(call: str, hip0: GpuDevice, stub: Stub, before: dict[str, int]) -> None:
    stub.fail(call, CAPTURE_INVALIDATED)
    with pytest.raises(DeviceError, match=rf"{call} failed: hipErrorStreamCaptureInvalidated \(901\)"):
        capture_and_replay(hip0)
    assert left_behind(stub, before) == {}
    assert np.array_equal(capture_and_replay(hip0), hk.attend(*host_inputs(), POSITIONS))


def test_a_capture_left_by_an_exception_is_dropped(hip0: GpuDevice, stub: Stub, before: dict[str, int]) -> None:
    stream = hip0.stream()
    with pytest.raises(KeyError), hip0.capture(stream) as graph:
        raise KeyError
    with pytest.raises(DeviceError, match="nothing to replay"):
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(attend_once(hip0, stream), hk.attend(*host_inputs(), POSITIONS))
    del stream, graph
    assert left_behind(stub, before) == {}


def test_a_capture_spoiled_from_outside_is_an_error_at_its_end(
    hip0: GpuDevice, stub: Stub, before: dict[str, int]
) -> None:
    """Another library waits for the device, which HIP does not allow while a stream is being captured."""
    stream = hip0.stream()
    with (
        pytest.raises(DeviceError, match=r"hipStreamEndCapture failed: hipErrorStreamCaptureInvalidated \(901\)"),
        hip0.capture(stream),
        pytest.raises(DeviceError, match="hipErrorStreamCaptureUnsupported"),
    ):
        hip0.driver.synchronize()
    assert stub.complaints() == ["hipDeviceSynchronize: a stream is being captured"]
    stream.synchronize()
    del stream
    assert left_behind(stub, before) == {}
    assert works(hip0)


# ---- the end of a device's things -----------------------------------------------------------------------------------


def test_a_failing_free_is_not_raised_from_the_garbage_collector(hip0: GpuDevice, stub: Stub) -> None:
    array = hip0.to_device(POSITIONS)
    stub.fail("hipFree", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match="hipFree failed"):
        array.buffer.free()
    array = hip0.to_device(POSITIONS)
    stub.fail("hipFree", LAUNCH_FAILURE)
    del array
    gc.collect()
    assert works(hip0)
