"""AMD's HIP runtime through hip-python, as `gpu.Driver`.

Written for hip-python 7.2 and 10: they differ in the calls that fill in a struct (see `_filled`) and in the type of
their strings. The bindings load ROCm's library, and every function of it, when it is first called.
"""

from __future__ import annotations

import inspect
from typing import Any

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.running.devices import dlpack
from hipfire_kernels.running.devices.driver import HINTS, refuse_after_fork
from hipfire_kernels.running.devices.gpu import GpuDevice

_NO_DEVICE = 100
_HINTS = {
    **HINTS,
    _NO_DEVICE: (
        "ROCm's runtime is here, but no AMD GPU that this process may use: look at HIP_VISIBLE_DEVICES, at whether "
        "the amdgpu driver is loaded, and whether this user may open /dev/kfd and /dev/dri"
    ),
    906: "a copy or a wait came between, which HIP forbids while any stream is being captured",
}


def _api() -> Any:
    """hip-python's `hip` module. DeviceError where it is not installed."""
    try:
        from hip import hip
    except ImportError as error:
        raise DeviceError(
            f"hip-python is not importable ({error}); required for hip devices: pip install hip-python"
        ) from None
    return hip


class HipDriver:
    """See `gpu.Driver`."""

    vendor = "hip"
    toolchain = "hiprtc"
    dlpack_device = dlpack.ROCM

    def __init__(self) -> None:
        self._hip = _api()
        self._found: set[int] = set()
        self._hands_out = len(inspect.signature(self._hip.hipGetDeviceProperties).parameters) == 1
        self.count()

    def _status(self, name: str, *args: Any) -> tuple[Any, list[Any]]:
        """Call a function of the runtime: its status and outputs. A failure does not stay in the runtime.

        HIP keeps the last error of a thread until it is asked for: the next program to ask would be blamed.
        """
        try:
            status, *outputs = getattr(self._hip, name)(*args)
            if int(status):
                self._hip.hipGetLastError()
        except RuntimeError as error:  # a missing library, or one too old to have the function
            raise DeviceError(
                f"{name} cannot be called: {error}. Required: ROCm's runtime, libamdhip64; install it, or point "
                "ROCM_PATH (before hip-python 10: LD_LIBRARY_PATH) at it"
            ) from None
        return status, outputs

    def _call(self, name: str, *args: Any) -> Any:
        """The outputs of a call, or DeviceError with the name of its status."""
        status, outputs = self._status(name, *args)
        if int(status):
            hint = _HINTS.get(int(status))
            raise DeviceError(f"{name} failed: {status.name} ({int(status)}){f': {hint}' if hint else ''}")
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _filled(self, name: str, kind: str, *args: Any) -> tuple[Any, Any]:
        """Status and struct of a call that fills one in: handed out since hip-python 10, passed in before."""
        if self._hands_out:
            status, (struct,) = self._status(name, *args)
        else:
            struct = getattr(self._hip, kind)()
            status, _ = self._status(name, struct, *args)
        return status, struct

    def count(self) -> int:
        """How many devices there are; at least one."""
        return int(self._call("hipGetDeviceCount"))

    def activate(self, index: int) -> None:
        if index not in self._found:
            total = self.count()
            if not 0 <= index < total:
                raise DeviceError(f"hip:{index} does not exist; this machine has {total} HIP devices")
            self._found.add(index)
        self._call("hipSetDevice", index)

    def _properties(self, index: int) -> Any:
        status, properties = self._filled("hipGetDeviceProperties", "hipDeviceProp_t", index)
        if int(status):
            raise DeviceError(f"hipGetDeviceProperties failed for hip:{index}: {status.name} ({int(status)})")
        return properties

    def arch_name(self, index: int) -> str:
        return _text(self._properties(index).gcnArchName)

    def describe(self, index: int) -> dict[str, Any]:
        properties = self._properties(index)
        return {
            "name": _text(properties.name),
            "driver_api": int(self._call("hipRuntimeGetVersion")),
            "multiprocessors": int(properties.multiProcessorCount),
            "l2_bytes": int(properties.l2CacheSize),
            "memory_bytes": int(properties.totalGlobalMem),
        }

    def malloc(self, nbytes: int) -> int:
        return int(self._call("hipMalloc", nbytes))

    def free(self, pointer: int) -> None:
        self._call("hipFree", pointer)

    def copy_in(self, pointer: int, host: int, nbytes: int) -> None:
        self._call("hipMemcpyHtoD", pointer, host, nbytes)

    def copy_out(self, host: int, pointer: int, nbytes: int) -> None:
        self._call("hipMemcpyDtoH", host, pointer, nbytes)

    def owner(self, pointer: int) -> int | None:
        status, found = self._filled("hipPointerGetAttributes", "hipPointerAttribute_t", pointer)
        kinds = self._hip.hipMemoryType
        if int(status) or found.type not in (kinds.hipMemoryTypeDevice, kinds.hipMemoryTypeManaged):
            return None
        return int(found.device)

    def stream_create(self) -> int:
        return int(self._call("hipStreamCreateWithFlags", int(self._hip.hipStreamNonBlocking)))

    def stream_destroy(self, stream: int) -> None:
        self._call("hipStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("hipStreamSynchronize", stream)

    def stream_device(self, stream: int) -> int:
        return int(self._call("hipStreamGetDevice", stream))

    def stream_wait(self, stream: int, event: int) -> None:
        self._call("hipStreamWaitEvent", stream, event, 0)

    def synchronize(self) -> None:
        self._call("hipDeviceSynchronize")

    def event_create(self) -> int:
        return int(self._call("hipEventCreate"))

    def event_destroy(self, event: int) -> None:
        self._call("hipEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", event, stream)

    def event_synchronize(self, event: int) -> None:
        self._call("hipEventSynchronize", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("hipEventElapsedTime", start, end))

    def module_load(self, code: bytes) -> int:
        return int(self._call("hipModuleLoadData", code))

    def module_unload(self, module: int) -> None:
        self._call("hipModuleUnload", module)

    def module_function(self, module: int, entry: str, arena_bytes: int) -> Any:
        return self._call("hipModuleGetFunction", module, entry.encode())

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: int, params: int, stream: int, early: bool
    ) -> None:
        self._call("hipModuleLaunchKernel", function, *grid, block, 1, 1, 0, stream, params, None)

    def capture_begin(self, stream: int) -> None:
        # Relaxed: the other modes forbid allocating, and so a workspace, until the capture ends.
        mode = self._hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed
        self._call("hipStreamBeginCapture", stream, mode)

    def capture_end(self, stream: int) -> int:
        graph = self._call("hipStreamEndCapture", stream)
        try:
            return int(self._call("hipGraphInstantiateWithFlags", graph, 0))
        finally:
            self._call("hipGraphDestroy", graph)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._call("hipGraphLaunch", graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._call("hipGraphExecDestroy", graph)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_driver: HipDriver | None = None


def driver() -> HipDriver:
    """The process's runtime binding. DeviceError where there is none, or no device."""
    global _driver
    if _driver is None:
        _driver = HipDriver()
        refuse_after_fork(_driver)
    return _driver


def open_device(index: int) -> GpuDevice:
    """The GPU with this index. DeviceError: no hip-python, no ROCm, or no such device."""
    return GpuDevice(driver(), index)
