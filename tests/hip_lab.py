"""A ROCm without a card: the libraries of hip_stub/, and kernels for them, in a folder where hip-python looks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from dtype_lab import DTYPES

from hipfire_kernels import build, families
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.resources import read_args, read_resources
from hipfire_kernels.building.toolchains.host import HostToolchain
from hipfire_kernels.running.timing import READ

SOURCES = Path(__file__).parent / "hip_stub"
KINDS = ("memory", "stream", "event", "module", "function", "graph", "executable graph")

OUT_OF_MEMORY, LAUNCH_FAILURE, NO_BINARY, CAPTURE_INVALIDATED = 2, 719, 209, 901
"""Statuses of the runtime, to fail with."""


def compile_library(name: str) -> bytes:
    """One of hip_stub/*.c as a shared object."""
    source = (SOURCES / f"{name}.c").read_text(encoding="utf-8")
    built = HostToolchain().compile(source, arch("host"), ("-x", "c", "-std=gnu17", "-ldl", "-lpthread"))
    return built.code


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


def install(root: Path, archs: Iterable[str]) -> None:
    """Put the libraries under `root`/lib, and under `root`/kernels what they need to build, run and time `variants()`.

    For each kernel: its source and an offline clang's code object of it per arch, which the hiprtc stub hands out; its
    host build, which the HIP stub runs; and the argument layout that the code object states.
    """
    lib, kernels = root / "lib", root / "kernels"
    for folder in (lib, kernels):
        folder.mkdir(parents=True)
    (lib / "libamdhip64.so").write_bytes(compile_library("hip_stub"))
    (lib / "libhiprtc.so").write_bytes(compile_library("hiprtc_stub"))
    for variant in (*variants(), READ.variant(), DTYPES.variant()):
        for name in archs:
            made = build(variant, name, "clang")
            (kernels / f"{variant.entry}.{name}.hip").write_text(made.source, encoding="utf-8")
            (kernels / f"{variant.entry}.{name}.co").write_bytes(made.code)
        host = build(variant, "host")
        (kernels / f"{variant.entry}.so").write_bytes(host.code)
        threads = read_resources(made.code, arch(name), variant.entry).max_workgroup
        given = read_args(made.code, variant.entry)
        signature = "".join("p" if a.kind == "global_buffer" else str(a.size) for a in given)
        text = f"{host.resources.lds_bytes} {threads} {signature}\n"
        (kernels / f"{variant.entry}.args").write_text(text, encoding="utf-8")


def environment(root: Path, archs: str) -> dict[str, str]:
    """What a child process needs to find `install`'s libraries, with these devices."""
    return {
        "ROCM_PATH": str(root),
        "LD_LIBRARY_PATH": str(root / "lib"),  # hip-python before 10 looks nowhere else
        "HIP_STUB_KERNELS": str(root / "kernels"),
        "HIP_STUB_ARCHS": archs,
    }


class Stub:
    """The stub that this process has loaded, seen from the side."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.path.join(os.environ["ROCM_PATH"], "lib", "libamdhip64.so"))
        self._library.hip_stub_complaints.restype = ctypes.c_char_p

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Of the calls of this function from now on, the one behind `after` others fails."""
        self._library.hip_stub_fail(call.encode(), after, status)

    def cost(self, part: str, fixed_us: float, block_us: float) -> None:
        """Kernels with `part` in their name take this long from now on; events show what kernels have taken."""
        self._library.hip_stub_cost(part.encode(), ctypes.c_double(fixed_us), ctypes.c_double(block_us))

    def calls(self, call: str) -> int:
        """How often the function has been called."""
        return int(self._library.hip_stub_calls(call.encode()))

    def live(self) -> dict[str, int]:
        """Objects that exist, by kind."""
        return {kind: int(self._library.hip_stub_live(kind.encode())) for kind in KINDS}

    def complaints(self) -> list[str]:
        """What was used wrongly since the last time this was asked. Ends faults that have not come to pass."""
        text = self._library.hip_stub_complaints().decode()
        self._library.hip_stub_forget()
        return text.splitlines()
