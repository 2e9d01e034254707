"""What only the HIP stand-in has: two archs, statuses that stay in the runtime, a compiler that ends its process."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import opened
from hip import hip
from inputs import Inputs, chain
from on_faults import TILE, attend_once, left_behind
from standin_lab import INVALID_VALUE, LAUNCH_FAILURE, StandIn

import hipfire_kernels as hk
from hipfire_kernels.dispatch import Decision
from hipfire_kernels.errors import CompileError, DeviceError, InputError, NotAdmitted, ToolchainUnavailable
from hipfire_kernels.running.devices.gpu import GpuDevice


def test_the_card_is_described(gpu0: GpuDevice) -> None:
    assert gpu0.describe() == {
        "device": "hip:0",
        "arch": "gfx1100:sramecc-:xnack-",
        "name": "Stub Radeon",
        "driver_api": 70200000,
        "multiprocessors": 48,
        "l2_bytes": 6 << 20,
        "memory_bytes": 24 << 30,
    }
    assert gpu0.arch.name == "gfx1100"
    assert gpu0.toolchain == "hiprtc"
    assert repr(gpu0) == "<GpuDevice hip:0 gfx1100:sramecc-:xnack->"


def test_devices_by_name(gpu0: GpuDevice) -> None:
    assert hk.devices() == ("hip:0", "hip:1", "hip:3", "host")
    assert hk.device("auto") is gpu0
    assert hk.device("hip:0") is gpu0
    assert hk.device("hip:00") is gpu0
    with pytest.raises(DeviceError, match=r"hip:2 cannot be used, .* arch 'gfx906' is not known; known archs: gfx1100"):
        hk.device("hip:2")
    with pytest.raises(DeviceError, match="hip:4 does not exist; this machine has 4 HIP devices"):
        hk.device("hip:4")
    for wrong in ("hip", "hip:", "hip:-1", "hip:0x1", "HIP:0", "rocm:0", ""):
        with pytest.raises(InputError, match="is not known; required: host, hip:N, cuda:N or auto"):
            hk.device(wrong)


def test_multirow_needs_evidence_for_the_exact_arch(gpu0: GpuDevice, gpu1: GpuDevice) -> None:
    """gfx1100 has evidence for rows8 above 4096 keys; gfx1201 runs the established route and says why."""
    inputs, positions = Inputs.make(4200), chain(4200)
    seen: list[Decision] = []
    got = [where.to_host(hk.attend(*inputs.on(where), positions, on_decision=seen.append)) for where in (gpu0, gpu1)]
    assert [decision.route for decision in seen] == ["rows8", "tile_batched"]
    assert [check.name for check in seen[1].rejected["rows8"] if not check.ok] == ["evidence"]
    want = inputs.wanted(positions)
    assert np.array_equal(got[0], want)
    assert np.array_equal(got[1], want)
    with pytest.raises(NotAdmitted, match="evidence: None, required a parity and speed record of rows8"):
        hk.attend(*inputs.on(gpu1), positions, route="rows8")


def last_error() -> object:
    (status,) = hip.hipGetLastError()
    return status


def test_the_caller_of_the_runtime_is_not_blamed_for_our_errors(gpu0: GpuDevice, stub: StandIn) -> None:
    gpu0.driver.owner(id(gpu0))  # asks about memory that HIP does not know
    with pytest.raises(DeviceError, match=stub.failure("copy_out", INVALID_VALUE)):
        gpu0.driver.copy_out(0, 0, 4)
    stub.complaints()
    assert last_error() == hip.hipError_t.hipSuccess
    stub.fail("launch", LAUNCH_FAILURE)
    with pytest.raises(DeviceError, match=stub.failure("launch", LAUNCH_FAILURE)):
        attend_once(gpu0)
    assert last_error() == hip.hipError_t.hipSuccess


def test_a_code_object_of_another_arch_is_refused_by_the_runtime(gpu1: GpuDevice, stub: StandIn) -> None:
    before = stub.live()
    artifact = hk.build(TILE.variant(head_dim=128, mask="causal"), "gfx1100", "hiprtc")
    with pytest.raises(DeviceError, match=r"hipErrorNoBinaryForGpu \(209\): the code object is for another arch"):
        gpu1.load(artifact)
    assert left_behind(stub, before) == {}


def test_a_compiler_that_aborts_is_survived(gpu0: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_COMPILE", "ABORT")
    variant = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=False)
    with pytest.raises(CompileError, match=r"did not compile .*: the compiling process: ended by SIGABRT"):
        hk.build(variant, gpu0.arch.name, gpu0.toolchain)


def test_no_compiler_for_the_card_lists_why() -> None:
    with pytest.raises(ToolchainUnavailable) as refused:
        attend_once(opened(3))
    said = str(refused.value)
    assert "no compiler for gfx1101 can work here:\n  hiprtc: libhiprtc: it cannot compile an empty kernel" in said
    assert "SIGABRT" in said
    assert "ziglang" not in said  # it was not asked for, and would not be used
