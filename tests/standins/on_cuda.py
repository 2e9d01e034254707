"""What only the CUDA stand-in has: contexts, arenas, launches that begin early, a compiler in this process."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import opened
from inputs import Inputs, chain
from standin_lab import NO_BINARY, NOT_FOUND, StandIn, cubin, make_ready

import hipfire_kernels as hk
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.toolchains import nvrtc
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.parity import worst_row
from hipfire_kernels.errors import CompileError, DeviceError, InputError, ToolchainError, ToolchainUnavailable
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices import cuda
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.draft import DraftWorkspace, draft_launches

SM_90 = arch("sm_90")
TILE = hk.families()["attention_flash_q8_0_tile_batched"].variant(head_dim=128, mask="causal")
GQA = hk.families()["attention_verify_gqa_q8"].variant(group=6, rows=8, head_dim=128)


def test_the_card_is_described(gpu0: GpuDevice) -> None:
    found = gpu0.describe()
    assert found.pop("driver") == cuda._driver_version()  # the kernel driver's, which is the machine's own
    assert found == {
        "device": "cuda:0",
        "arch": "sm_90",
        "name": "Stub Hopper",
        "driver_api": 13000,
        "multiprocessors": 48,
        "l2_bytes": 6 << 20,
        "memory_bytes": 80 << 30,
    }
    assert (gpu0.arch.name, gpu0.toolchain) == ("sm_90", "nvrtc")
    assert repr(gpu0) == "<GpuDevice cuda:0 sm_90>"


def test_devices_by_name(gpu0: GpuDevice) -> None:
    assert hk.devices() == ("cuda:0", "cuda:1", "host")
    assert hk.device("auto") is gpu0
    assert hk.device("cuda:00") is gpu0
    with pytest.raises(DeviceError, match=r"cuda:2 cannot be used, .* arch 'sm_70' is not known; known archs: gfx1100"):
        hk.device("cuda:2")
    with pytest.raises(DeviceError, match="cuda:3 does not exist; this machine has 3 CUDA devices"):
        hk.device("cuda:3")
    for wrong in ("cuda", "cuda:", "cuda:-1", "CUDA:0"):
        with pytest.raises(InputError, match="is not known; required: host, hip:N, cuda:N or auto"):
            hk.device(wrong)


def test_the_version_of_the_kernel_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "version"
    monkeypatch.setattr(cuda, "Path", lambda name: told)
    assert cuda._driver_version() is None
    told.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 12.2.0\n")
    assert cuda._driver_version() == "580.159.04"


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_a_thread_that_has_no_context_gets_the_devices(gpu0: GpuDevice, gpu1: GpuDevice) -> None:
    """Another library's context, or none, is current: arrays, streams and events end up on the right device anyway."""
    from cuda.bindings import driver as cu

    seen: list[tuple[int, int]] = []

    def work() -> None:
        assert int(cu.cuCtxGetDevice()[0]) == 201  # none yet
        for where in (gpu1, gpu0):
            array, stream = where.to_device(np.zeros(4, np.float32)), where.stream()
            gpu1.driver.activate(1)
            seen.append((where.driver.owner(array.pointer), where.driver.stream_device(stream.handle)))
            assert int(cu.cuCtxGetDevice()[1]) == 1  # asking for a stream's device leaves the context as it was

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert seen == [(1, 1), (0, 0)]


# ---- launches -------------------------------------------------------------------------------------------------------


def test_a_reducer_begins_early(gpu0: GpuDevice, stub: StandIn) -> None:
    """The stand-in refuses one that does not wait itself for the launch ahead of it."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((8, 6, 128), np.float32)
    k, v = (hk.quantize_q8_0(rng.standard_normal((400, 1, 128), np.float32)) for _ in range(2))
    there = [gpu0.to_device(x) for x in (q, k, v, np.arange(392, 400, dtype=np.int32))]
    out = gpu0.empty(q.shape, np.float32)
    plan = verify_plan(GQA, gpu0, check_verify(gpu0, *there[:3]), 400)
    before = stub._library.standin_calls(b"cuLaunchKernelEx")
    plan.run(*there, out)
    assert stub._library.standin_calls(b"cuLaunchKernelEx") == before + 1
    assert worst_row(gpu0.to_host(out), reference.attend(q, k, v, np.arange(392, 400))) < 1e-5
    stream = gpu0.stream()
    with gpu0.capture(stream) as graph:  # the launch that begins early is in this stream, not in the one before
        plan.run(*there, out, stream=stream)
    gpu0.write(out, np.full(q.shape, np.nan, np.float32))
    graph.launch(stream)
    assert worst_row(gpu0.to_host(out), reference.attend(q, k, v, np.arange(392, 400))) < 1e-5
    tile = verify_plan(TILE, gpu0, check_verify(gpu0, *there[:3]), 400)
    tile.run(*there, out)
    with pytest.raises(DeviceError, match=r"cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        gpu0.launch([launch._replace(early=True) for launch in tile.launches])
    assert "early 1" in stub.complaints()[0]


def test_more_configurations_than_are_kept(gpu0: GpuDevice, stub: StandIn) -> None:
    """A launch that begins early has a configuration for each stream, grid and block, of which 256 are kept."""
    driver = cuda.driver()
    driver._streams[0] = driver._cu.CUstream(0)
    for grid in range(1, 600):
        made = driver._early_config((grid, 2, 3), 128, 64, 0)
        assert (made.gridDimX, made.gridDimY, made.gridDimZ, made.blockDimX, made.sharedMemBytes) == (
            grid,
            2,
            3,
            128,
            64,
        )
        assert driver._early_config((grid, 2, 3), 128, 64, 0) is made
        assert len(driver._early) <= 257


@pytest.mark.parametrize("early", [False, True])
def test_a_driver_without_the_launch(early: bool, gpu0: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings look for a function when it is called first, and have an error of their own for a missing one."""

    def missing(*_: Any) -> None:
        raise RuntimeError("function cuLaunchKernel is not found")

    driver = cuda.driver()
    monkeypatch.setattr(driver._cu, "cuLaunchKernelEx", missing)
    monkeypatch.setattr(driver, "_launch_kernel", missing)
    with pytest.raises(DeviceError, match=r"cuLaunchKernel cannot be called: function .* Required: NVIDIA's driver"):
        driver.launch((0, 0), (1, 1, 1), 32, 0, 0, early)


@pytest.fixture(scope="module")
def wide() -> Variant:
    """A kernel whose LDS is more than an sm_90 declares with fixed addresses: the launch has to give it."""
    variant = hk.families()["attention_dflash_wmma_n64_f32"].variant(head_dim=128, kv="f16", sliding=False)
    assert SM_90.arena_bytes(variant.lds_bytes("sm_90")) == 64 * 1024
    make_ready(Path(os.environ["STANDIN_KERNELS"]), StandIn().face, variant)
    return variant


def test_a_launch_gives_the_arena(wide: Variant, gpu0: GpuDevice, stub: StandIn) -> None:
    rng = np.random.default_rng(5)
    q = rng.standard_normal((16, 4, 128), np.float32)
    k, v = (rng.standard_normal((80, 2, 128), np.float32).astype(np.float16) for _ in range(2))
    there = [gpu0.to_device(x) for x in (q, k, v)]
    out = gpu0.empty(q.shape, np.float32)
    launches = draft_launches(gpu0, *there, out, variant=wide, workspace=DraftWorkspace())
    stream = gpu0.stream()
    gpu0.launch(launches, stream)
    want = reference.draft_attend(q, k, v)
    assert worst_row(gpu0.to_host(out), want) < wide.tolerance.worst_row
    with gpu0.capture(stream) as graph:
        gpu0.launch(launches, stream)
    gpu0.write(out, np.full(q.shape, np.nan, np.float32))
    graph.launch(stream)
    assert worst_row(gpu0.to_host(out), want) < wide.tolerance.worst_row


def test_an_arena_that_was_not_asked_for_is_refused(wide: Variant, gpu0: GpuDevice, stub: StandIn) -> None:
    """The stand-in's own check: a function may have 48 KiB until it is given leave for more."""
    driver = gpu0.driver
    artifact = hk.build(wide, "sm_90", "nvrtc")
    module = driver.module_load(artifact.code)
    function, _ = driver.module_function(module, wide.entry, 0)
    args = (np.zeros(64, np.uint8)).ctypes.data
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.launch((function, 64 * 1024), (1, 1, 1), 128, args, 0, False)
    assert "65536 bytes" in stub.complaints()[0]
    driver.module_unload(module)


# ---- modules --------------------------------------------------------------------------------------------------------


def test_a_cubin_that_the_card_does_not_take(gpu0: GpuDevice, stub: StandIn) -> None:
    before = stub.live()
    artifact = hk.build(TILE, "sm_90", "nvrtc")
    other = dataclasses.replace(artifact, key="other", code=cubin(TILE.entry, 8, 8, sm=80))
    with pytest.raises(DeviceError, match=stub.failure("module_load", NO_BINARY) + ": the code object is for another"):
        gpu0.load(other)
    without = dataclasses.replace(artifact, key="without", code=cubin("something_else", 8, 8))
    with pytest.raises(DeviceError, match=stub.failure("module_function", NOT_FOUND)):
        gpu0.load(without)
    assert stub.live() == before


# ---- the compiler ---------------------------------------------------------------------------------------------------


def compiled(source: str, *extra: str) -> Any:
    return nvrtc.NvrtcToolchain().compile(source, SM_90, extra)


def test_compiles() -> None:
    toolchain = nvrtc.NvrtcToolchain()
    built = compiled("the source, WARN", "-DX")
    options = "--gpu-architecture=sm_90a --std=c++17 --fmad=false --restrict"
    assert " ".join(toolchain.options(SM_90)) == options
    assert built.code.decode() == f"options: {options} -DX\nsource: the source, WARN"
    assert built.log == "kernel:1:1: warning: mind this"
    assert toolchain.identity(SM_90) == "nvrtc 13.0"
    assert toolchain.targets(SM_90)
    assert not toolchain.targets(arch("gfx1100"))


def test_an_empty_log_spoils_no_shared_bytes() -> None:
    """The log is one byte, and the bindings write into the bytes object that they are given."""
    assert compiled("the source").log == ""
    assert [bytes([n])[0] for n in range(256)] == list(range(256))


@pytest.mark.parametrize(
    ("word", "why"), [("WRONG", "kernel:7: error: no such thing"), ("OPTION", "NVRTC_ERROR_INVALID_OPTION")]
)
def test_a_source_that_is_refused(word: str, why: str) -> None:
    with pytest.raises(CompileError, match=f"(?s)nvrtc did not compile the source for sm_90 .*{why}") as refused:
        compiled(word)
    assert refused.value.source == word
    assert ("1 error generated" in refused.value.log) is (word == "WRONG")


@pytest.mark.parametrize("function", ["nvrtcCreateProgram", "nvrtcGetProgramLog", "nvrtcGetCUBINSize"])
def test_a_function_that_fails(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NVRTC", function)
    with pytest.raises(ToolchainError, match=f"{function} failed: NVRTC_ERROR_INTERNAL_ERROR"):
        compiled("the source")
    monkeypatch.delenv("STANDIN_NVRTC")
    assert compiled("the source").code


def test_a_library_that_does_not_know_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_NVRTC", "nvrtcVersion")
    nvrtc._candidate.cache_clear()
    assert nvrtc.NvrtcToolchain().available(SM_90) == "libnvrtc: nvrtcVersion failed: NVRTC_ERROR_INTERNAL_ERROR"
    monkeypatch.delenv("STANDIN_NVRTC")
    nvrtc._candidate.cache_clear()
    assert nvrtc.NvrtcToolchain().available(SM_90) is None


def test_the_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through nvdisasm, with line numbers; one that fails, and none, say so."""
    program = tmp_path / "nvdisasm"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, said in (('cat "$3"', "-DX -lineinfo\nsource: the source"), ("echo broken >&2; exit 4", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        if said is not None:
            assert nvrtc.NvrtcToolchain().assembly("the source", SM_90, ("-DX",)).endswith(said)
    with pytest.raises(ToolchainError, match="nvdisasm did not read the cubin: exit status 4; broken"):
        nvrtc.NvrtcToolchain().assembly("the source", SM_90)
    monkeypatch.setattr(nvrtc, "_nvdisasm", lambda: None)
    with pytest.raises(ToolchainUnavailable, match="needs nvdisasm, which is neither on the PATH nor installed"):
        nvrtc.NvrtcToolchain().assembly("the source", SM_90)


def test_nvdisasm_is_found_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for version in ("cu12", "cu13"):
        folder = tmp_path / "nvidia" / version / "bin"
        folder.mkdir(parents=True)
        (folder / "nvdisasm").write_text("#!/bin/sh\n")
        (folder / "nvdisasm").chmod(0o755 if version == "cu12" else 0o644)
    assert nvrtc._nvdisasm() == str(tmp_path / "nvidia" / "cu12" / "bin" / "nvdisasm")


def test_two_cards_of_one_arch(gpu0: GpuDevice) -> None:
    """Two devices of one arch share an artifact and each loads it."""
    inputs, other = Inputs.make(), opened(1)
    for where in (gpu0, other):
        assert np.array_equal(where.to_host(hk.attend(*inputs.on(where), chain(77))), inputs.wanted(chain(77)))
