"""CUDA's driver API through cuda-bindings, as `gpu.Driver`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.driver import HINTS, refuse_after_fork
from hipfire_kernels.running.devices.gpu import GpuDevice

_HINTS = {
    **HINTS,
    100: "NVIDIA's driver is here, but no GPU that this process may use: look at CUDA_VISIBLE_DEVICES and nvidia-smi",
}


def _api() -> Any:
    """The bindings' driver module. DeviceError: not installed, or no NVIDIA driver."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings is not importable ({error}); required for cuda devices: install hipfire-kernels[cuda]"
        ) from None
    return driver


class CudaDriver:
    """See `gpu.Driver`."""

    vendor = "cuda"
    toolchain = "nvrtc"
    dlpack_device = dlpack.CUDA

    def __init__(self) -> None:
        self._cu = _api()
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)
        # A launch is two microseconds cheaper when the bindings need not make an object of each handle.
        self._launch_kernel = self._cu.cuLaunchKernel
        self._set_current = self._cu.cuCtxSetCurrent
        self._streams: dict[int, Any] = {}
        self._early: dict[tuple[tuple[int, int, int], int, int, int], Any] = {}

    def _call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver API; its outputs, or DeviceError with the name of the status."""
        try:
            status, *outputs = getattr(self._cu, name)(*args)
        except RuntimeError as error:
            raise _lacking(name, error) from None
        if int(status):
            raise _failed(name, status)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def count(self) -> int:
        """How many devices there are."""
        return int(self._call("cuDeviceGetCount"))

    def activate(self, index: int) -> None:
        context = self._contexts.get(index)
        if context is None:
            total = self.count()
            if not 0 <= index < total:
                raise DeviceError(f"cuda:{index} does not exist; this machine has {total} CUDA devices")
            context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", index))
            self._contexts[index] = context
        (status,) = self._set_current(context)
        if status:
            raise _failed("cuCtxSetCurrent", status)

    def _attribute(self, name: str, index: int) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", index)))

    def arch_name(self, index: int) -> str:
        major = self._attribute("COMPUTE_CAPABILITY_MAJOR", index)
        return f"sm_{major}{self._attribute('COMPUTE_CAPABILITY_MINOR', index)}"

    def describe(self, index: int) -> dict[str, Any]:
        name = self._call("cuDeviceGetName", 128, self._call("cuDeviceGet", index))
        return {
            "name": name.split(b"\0")[0].decode(),
            "driver": _driver_version(),
            "driver_api": int(self._call("cuDriverGetVersion")),
            "multiprocessors": self._attribute("MULTIPROCESSOR_COUNT", index),
            "l2_bytes": self._attribute("L2_CACHE_SIZE", index),
            "memory_bytes": int(self._call("cuDeviceTotalMem", self._call("cuDeviceGet", index))),
        }

    def malloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, pointer: int) -> None:
        self._call("cuMemFree", pointer)

    def copy_in(self, pointer: int, host: int, nbytes: int) -> None:
        self._call("cuMemcpyHtoD", pointer, host, nbytes)

    def copy_out(self, host: int, pointer: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoH", host, pointer, nbytes)

    def owner(self, pointer: int) -> int | None:
        attribute = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, ordinal = self._cu.cuPointerGetAttribute(attribute, pointer)
        return None if int(status) else int(ordinal)

    def stream_create(self) -> int:
        return int(self._call("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def stream_destroy(self, stream: int) -> None:
        self._streams.pop(stream, None)
        self._call("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def stream_device(self, stream: int) -> int:
        self._call("cuCtxPushCurrent", self._call("cuStreamGetCtx", stream))
        try:
            return int(self._call("cuCtxGetDevice"))
        finally:
            self._call("cuCtxPopCurrent")

    def stream_wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def event_create(self) -> int:
        return int(self._call("cuEventCreate", 0))

    def event_destroy(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def module_load(self, code: bytes) -> int:
        return int(self._call("cuModuleLoadData", code))

    def module_unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def module_function(self, module: int, entry: str, arena_bytes: int) -> Any:
        function = self._call("cuModuleGetFunction", module, entry.encode())
        if arena_bytes:
            attribute = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, arena_bytes)
        return (function, arena_bytes)

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: int, params: int, stream: int, early: bool
    ) -> None:
        on = self._streams.get(stream)
        if on is None:
            on = self._streams[stream] = self._cu.CUstream(stream)
        (handle, arena), (x, y, z) = function, grid
        try:
            if early:
                config = self._early_config(grid, block, arena, stream)
                (status,) = self._cu.cuLaunchKernelEx(config, handle, params, 0)
            else:
                (status,) = self._launch_kernel(handle, x, y, z, block, 1, 1, arena, on, params, 0)
        except RuntimeError as error:
            raise _lacking("cuLaunchKernel", error) from None
        if status:
            raise _failed("cuLaunchKernel", status)

    def _early_config(self, grid: tuple[int, int, int], block: int, arena: int, stream: int) -> Any:
        """A launch that begins when the one ahead has let it, or ended. Made once for each shape: it takes longer to
        make than to use."""
        key = (grid, block, arena, stream)
        config = self._early.get(key)
        if config is None:
            if len(self._early) > 256:
                self._early.clear()
            attribute = self._cu.CUlaunchAttribute()
            attribute.id = self._cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config = self._early[key] = self._cu.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
            config.sharedMemBytes = arena
            config.hStream = self._streams[stream]
            config.attrs = [attribute]
            config.numAttrs = 1
        return config

    def capture_begin(self, stream: int) -> None:
        # Relaxed: the other modes forbid allocating, and so a workspace, until the capture ends.
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuStreamBeginCapture", stream, mode)

    def capture_end(self, stream: int) -> int:
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return int(self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)


def _lacking(name: str, error: RuntimeError) -> DeviceError:
    """For what the bindings raise where there is no driver, or one too old to have the function."""
    return DeviceError(f"{name} cannot be called: {error}. Required: NVIDIA's driver, libcuda, for CUDA 12 or later")


def _failed(name: str, status: Any) -> DeviceError:
    hint = _HINTS.get(int(status))
    return DeviceError(f"{name} failed: {status.name} ({int(status)}){f': {hint}' if hint else ''}")


def _driver_version() -> str | None:
    """The kernel driver's version, which the driver API does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text(encoding="ascii"))
        return found.group() if found else None
    return None


_driver: CudaDriver | None = None


def driver() -> CudaDriver:
    """The process's driver binding. DeviceError where there is none."""
    global _driver
    if _driver is None:
        _driver = CudaDriver()
        refuse_after_fork(_driver)
    return _driver


def open_device(index: int) -> GpuDevice:
    """The GPU with this index. DeviceError: no driver, or no such device."""
    return GpuDevice(driver(), index)
