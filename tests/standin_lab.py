"""GPUs without a card: the libraries of standins/ in a folder where the bindings look, and kernels for them.

Of each vendor the real bindings, and under them a library of the driver's functions (hip.c, cuda.c) and one of the
runtime compiler's (hiprtc.c, nvrtc.c). What they do not see: whether machine code is right (kernels run as they are
built for the host), that launches overlap or begin early, how long anything takes, and faults of the bindings' makers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtype_lab import DTYPES

from hipfire_kernels import build, families
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.args import Arg, Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.resources import read_args, read_resources
from hipfire_kernels.building.toolchains.host import HostToolchain
from hipfire_kernels.running.devices import host
from hipfire_kernels.running.scalars import CTYPES
from hipfire_kernels.running.timing import READ

SOURCES = Path(__file__).parent / "standins"
KINDS = ("memory", "stream", "event", "module", "function", "graph", "executable graph")

INVALID_VALUE, OUT_OF_MEMORY, NO_BINARY, INVALID_HANDLE, NOT_FOUND, LAUNCH_FAILURE = 1, 2, 209, 400, 500, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
"""Statuses, to fail with. Both vendors have the same numbers."""


@dataclass(frozen=True)
class Face:
    """One vendor's stand-in.

    Attributes:
        vendor: as in the names of its devices.
        toolchain: what builds for them.
        libraries: of standins/*.c, and the names that the bindings look for.
        archs: of the devices: two that can be used, one that no kernel is built for, and, of HIP, one that its runtime
            compiler does not know.
        builds: the archs that kernels are made ready for.
        calls: of a driver's functions, in the words of `devices.driver.Driver`, the vendor's name.
        statuses: the vendor's names of those above.
    """

    vendor: str
    toolchain: str
    libraries: dict[str, tuple[str, ...]]
    archs: tuple[str, ...]
    builds: tuple[str, ...]
    calls: dict[str, str]
    statuses: dict[int, str]


_CALLS = (
    ("count", "hipGetDeviceCount", "cuDeviceGetCount"),
    ("activate", "hipSetDevice", "cuCtxSetCurrent"),
    ("describe", "hipGetDevicePropertiesR0600", "cuDeviceGetAttribute"),
    ("malloc", "hipMalloc", "cuMemAlloc"),
    ("free", "hipFree", "cuMemFree"),
    ("copy_in", "hipMemcpyHtoD", "cuMemcpyHtoD"),
    ("copy_out", "hipMemcpyDtoH", "cuMemcpyDtoH"),
    ("stream_create", "hipStreamCreateWithFlags", "cuStreamCreate"),
    ("stream_destroy", "hipStreamDestroy", "cuStreamDestroy"),
    ("stream_synchronize", "hipStreamSynchronize", "cuStreamSynchronize"),
    ("stream_device", "hipStreamGetDevice", "cuStreamGetCtx"),
    ("stream_wait", "hipStreamWaitEvent", "cuStreamWaitEvent"),
    ("synchronize", "hipDeviceSynchronize", "cuCtxSynchronize"),
    ("event_create", "hipEventCreate", "cuEventCreate"),
    ("event_destroy", "hipEventDestroy", "cuEventDestroy"),
    ("event_record", "hipEventRecord", "cuEventRecord"),
    ("event_synchronize", "hipEventSynchronize", "cuEventSynchronize"),
    ("event_elapsed", "hipEventElapsedTime", "cuEventElapsedTime"),
    ("module_load", "hipModuleLoadData", "cuModuleLoadData"),
    ("module_function", "hipModuleGetFunction", "cuModuleGetFunction"),
    ("launch", "hipModuleLaunchKernel", "cuLaunchKernel"),
    ("capture_begin", "hipStreamBeginCapture", "cuStreamBeginCapture"),
    ("capture_end", "hipStreamEndCapture", "cuStreamEndCapture"),
    ("instantiate", "hipGraphInstantiateWithFlags", "cuGraphInstantiate"),
    ("graph_launch", "hipGraphLaunch", "cuGraphLaunch"),
)
_STATUSES = (
    (INVALID_VALUE, "hipErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE"),
    (OUT_OF_MEMORY, "hipErrorOutOfMemory", "CUDA_ERROR_OUT_OF_MEMORY"),
    (NO_BINARY, "hipErrorNoBinaryForGpu", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (INVALID_HANDLE, "hipErrorInvalidHandle", "CUDA_ERROR_INVALID_HANDLE"),
    (NOT_FOUND, "hipErrorNotFound", "CUDA_ERROR_NOT_FOUND"),
    (LAUNCH_FAILURE, "hipErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED"),
    (CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (CAPTURE_INVALIDATED, "hipErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
)

HIP = Face(
    "hip",
    "hiprtc",
    {"hip": ("libamdhip64.so",), "hiprtc": ("libhiprtc.so",)},
    ("gfx1100:sramecc-:xnack-", "gfx1201", "gfx906", "gfx1101"),
    ("gfx1100", "gfx1201"),
    {call: name for call, name, _ in _CALLS},
    {status: name for status, name, _ in _STATUSES},
)
CUDA = Face(
    "cuda",
    "nvrtc",
    {"cuda": ("libcuda.so.1",), "nvrtc": ("libnvrtc.so.12", "libnvrtc.so.13")},
    ("sm_90", "sm_90", "sm_70"),
    ("sm_90",),
    {call: name for call, _, name in _CALLS},
    {status: name for status, _, name in _STATUSES},
)
FACES = {face.vendor: face for face in (HIP, CUDA)}


def missing(face: Face) -> str | None:
    """Why the vendor's bindings cannot be used here; None if they can."""
    needed = {"hip": "hip", "cuda": "cuda.bindings"}[face.vendor]
    try:
        found = importlib.util.find_spec(needed)
    except ModuleNotFoundError:
        found = None
    return None if found else f"{needed} is not installed (the test extra brings it)"


@functools.cache
def compile_library(name: str) -> bytes:
    """One of standins/*.c as a shared object, behind the declarations of what it calls in a kernel's host build."""
    source = f'{host._CDEF}\n#line 1 "{name}.c"\n' + (SOURCES / f"{name}.c").read_text(encoding="utf-8")
    options = ("-x", "c", "-std=gnu17", "-I", str(SOURCES), "-ldl", "-lpthread")
    return HostToolchain().compile(source, arch("host"), options).code


def variants() -> tuple[Variant, ...]:
    """One of each family at head_dim 128, and the tree and sliding forms."""
    shapes = (
        ("kv_cache_write_q8_0_batched", {"pair": True}),
        ("attention_flash_q8_0_tile_batched", {"mask": "causal"}),
        ("attention_flash_q8_0_tile_batched", {"mask": "tree"}),
        ("attention_flash_q8_0_rows", {"rows": 8}),
        ("attention_verify_gqa_q8", {"group": 6, "rows": 8}),
        ("attention_flash_reduce_batched", {"bound": "causal"}),
        ("attention_flash_reduce_batched", {"bound": "tree"}),
        ("attention_flash_reduce_batched", {"bound": "splits"}),
        ("attention_dflash_f32", {"sliding": False}),
        ("attention_dflash_f32", {"sliding": True}),
    )
    return tuple(
        families()[name].variant(**({"head_dim": 128} if "pair" not in more else {}), **more) for name, more in shapes
    )


def install(root: Path, face: Face) -> None:
    """Put the libraries under `root`/lib, and under `root`/kernels what they need to build, run and time `variants()`.

    For each kernel: its source and the code of it per arch, which the stand-in's compiler hands out; its host build,
    which the stand-in's driver runs; and ENTRY.args, see `host_build` in calls.h. HIP's code is an offline clang's,
    CUDA's is made up.
    """
    lib, kernels = root / "lib", root / "kernels"
    for folder in (lib, kernels):
        folder.mkdir(parents=True)
    for source, names in face.libraries.items():
        for name in names:
            (lib / name).write_bytes(compile_library(source))
    for variant in (*variants(), READ.variant(), DTYPES.variant()):
        make_ready(kernels, face, variant)


def make_ready(kernels: Path, face: Face, variant: Variant) -> None:
    """Add one kernel; see `install`."""
    for name in face.builds:
        made, told = _code(variant, name), arch(name).target or name
        (kernels / f"{variant.entry}.{told}.source").write_text(variant.source(name), encoding="utf-8")
        (kernels / f"{variant.entry}.{told}.code").write_bytes(made)
    built = build(variant, "host")
    (kernels / f"{variant.entry}.so").write_bytes(built.code)
    target = arch(face.builds[0])
    if target.dialect == "amd":
        threads = read_resources(made, target, variant.entry).max_workgroup
        given = read_args(made, variant.entry)
        signature = "".join("p" if a.kind == "global_buffer" else str(a.size) for a in given)
    else:
        threads = variant.threads(target.name)
        signature = "".join("p" if isinstance(a, Tensor) else str(_bytes(a)) for a in variant.args)
    waits = int("griddepcontrol.wait" in variant.source(target.name))
    arena = target.arena_bytes(variant.lds_bytes(target.name))
    text = f"{built.resources.lds_bytes} {variant.threads('host')} {threads} {arena} {waits} {signature}\n"
    (kernels / f"{variant.entry}.args").write_text(text, encoding="utf-8")


def _code(variant: Variant, name: str) -> bytes:
    if arch(name).dialect == "amd":
        return build(variant, name, "clang").code
    return cubin(
        variant.entry, registers=64, arguments=sum(8 if isinstance(a, Tensor) else _bytes(a) for a in variant.args)
    )


def _bytes(scalar: Arg) -> int:
    return ctypes.sizeof(CTYPES[scalar.dtype])


def cubin(entry: str, registers: int, arguments: int, frame: int = 0, code: int = 128, sm: int = 90) -> bytes:
    """A cubin of one kernel with nothing in it: what `building.cubin` and the stand-in read of one.

    Args:
        arguments, frame, code: bytes.
        sm: the arch it is for.
    """
    names = ("", ".shstrtab", ".strtab", ".symtab", ".nv.info", f".text.{entry}", f".nv.constant0.{entry}")
    shstrtab = b"\0".join(name.encode() for name in names) + b"\0"
    strtab = b"\0" + entry.encode() + b"\0"
    text = 5
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, text, 0, code)
    info = b"".join(struct.pack("<BBHII", 4, kind, 8, 1, value) for kind, value in ((0x2F, registers), (0x11, frame)))
    contents = (b"", shstrtab, strtab, symbols, info, bytes(code), bytes(0x210 + arguments))
    kinds = (0, 3, 3, 2, 0x70000000, 1, 1)
    body, headers, at = b"", b"", 64
    for name, kind, data in zip(names, kinds, contents, strict=True):
        where = shstrtab.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        link, size = (2, 24) if kind == 2 else (0, 0)
        headers += struct.pack("<IIQQQQIIQQ", where, kind, 0, 0, at + len(body), len(data), link, 1, 1, size)
        body += data
    head = b"\x7fELF" + bytes([2, 1, 1, 65, 8]) + bytes(7)
    head += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at + len(body), sm << 8 | 4, 64, 0, 0, 64, len(names), 1)
    return head + body + headers


def environment(root: Path, face: Face, archs: Iterable[str] | None = None) -> dict[str, str]:
    """What a child process needs to find `install`'s libraries, with these devices; by default the face's."""
    return {
        "ROCM_PATH": str(root),
        "LD_LIBRARY_PATH": str(root / "lib"),  # hip-python before 10 looks nowhere else
        "STANDIN": face.vendor,
        "STANDIN_KERNELS": str(root / "kernels"),
        "STANDIN_ARCHS": ",".join(face.archs if archs is None else archs),
        "STANDIN_UNKNOWN_ARCH": "gfx1101",
    }


class StandIn:
    """The driver's stand-in that this process has loaded, seen from the side."""

    def __init__(self) -> None:
        self.face = FACES[os.environ["STANDIN"]]
        driver, compiler = self.face.libraries.values()
        self._library = ctypes.CDLL(driver[0])
        if self.face is CUDA:
            for name in compiler:
                ctypes.CDLL(name)  # one in NVIDIA's wheel would come before it, but not before one that is loaded
        self._library.standin_complaints.restype = ctypes.c_char_p

    def name(self, index: int) -> str:
        """Of a device."""
        return f"{self.face.vendor}:{index}"

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Of the calls of this function from now on, the one behind `after` others fails."""
        self._library.standin_fail(self.face.calls[call].encode(), after, status)

    def failure(self, call: str, status: int) -> str:
        """A pattern for how the library tells that failure."""
        return rf"{self.face.calls[call]} failed: {self.face.statuses[status]} \({status}\)"

    def cost(self, part: str, fixed_us: float, block_us: float) -> None:
        """Kernels with `part` in their name take this long from now on; events show what kernels have taken."""
        self._library.standin_cost(part.encode(), ctypes.c_double(fixed_us), ctypes.c_double(block_us))

    def schedule(self, seed: int) -> None:
        """When what is queued is done, until the test's end; see `standin_schedule`."""
        self._library.standin_schedule(seed)

    def calls(self, call: str) -> int:
        """How often the function has been called; of a launch, in any form."""
        forms = (self.face.calls[call], *(("cuLaunchKernelEx",) if call == "launch" else ()))
        return sum(int(self._library.standin_calls(form.encode())) for form in forms)

    def live(self) -> dict[str, int]:
        """Objects that exist, by kind."""
        return {kind: int(self._library.standin_live(kind.encode())) for kind in KINDS}

    def complaints(self) -> list[str]:
        """What was used wrongly since the last time this was asked. Ends faults that have not come to pass."""
        text = self._library.standin_complaints().decode()
        self._library.standin_forget()
        return text.splitlines()
