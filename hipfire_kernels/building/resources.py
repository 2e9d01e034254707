"""What a compiled kernel takes from the machine, read from the code object itself.

The source is the AMDGPU metadata note (PT_NOTE, name `AMDGPU`, type 32, msgpack) that clang and hiprtc both
write; see the code object metadata section of LLVM's "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from hipfire_kernels.archs import WAVE, Arch
from hipfire_kernels.errors import HipfireError, InputError, ToolchainError

_NOTE_TYPE = 32
_HIGHER_IS_BETTER = ("occupancy",)
_LOWER_IS_BETTER = (
    "vgprs",
    "sgprs",
    "vgpr_spills",
    "sgpr_spills",
    "scratch_bytes",
    "lds_bytes",
    "code_bytes",
)


LABELS = {
    "vgprs": "VGPR",
    "sgprs": "SGPR",
    "vgpr_spills": "VGPR spills",
    "sgpr_spills": "SGPR spills",
    "scratch_bytes": "scratch B",
    "lds_bytes": "LDS B",
    "occupancy": "waves/SIMD",
    "code_bytes": "code B",
}
"""What tables show, and what they call it."""

IN_MEMORY = ("vgpr_spills", "sgpr_spills", "scratch_bytes")
"""What a kernel must have none of."""


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel. None where the arch has no such thing.

    Attributes:
        vgprs: vector registers of a lane.
        sgprs: scalar registers of a wave.
        vgpr_spills: vector registers spilled.
        sgpr_spills: scalar registers spilled; into VGPR lanes, so not a cost in memory by itself.
        scratch_bytes: private memory of a lane. Not implied by spills: an array indexed at run time needs it
        too. lds_bytes: LDS of a workgroup. kernarg_bytes: size of the argument segment. wavefront: lanes of a
        wave. max_workgroup: threads a workgroup may have; here always the number it does have. occupancy:
        waves that one SIMD can hold at a time; see `occupancy`. code_bytes: size of the kernel's
        instructions.
    """

    vgprs: int | None = None
    sgprs: int | None = None
    vgpr_spills: int | None = None
    sgpr_spills: int | None = None
    scratch_bytes: int | None = None
    lds_bytes: int | None = None
    kernarg_bytes: int | None = None
    wavefront: int | None = None
    max_workgroup: int | None = None
    occupancy: int | None = None
    code_bytes: int | None = None

    def as_dict(self) -> dict[str, int | None]:
        """Plain JSON values, in the order of the fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int | None]) -> Resources:
        """The reverse of `as_dict`. Fields that are absent are None.

        Raises:
            InputError: a name is not a field.
        """
        unknown = sorted(set(values) - set(FIELDS))
        if unknown:
            raise InputError(f"not a resource report: unknown field {unknown[0]!r}; fields: {', '.join(FIELDS)}")
        return cls(**values)


FIELDS = tuple(field.name for field in dataclasses.fields(Resources))


@dataclass(frozen=True)
class KernelArg:
    """One argument as the compiler laid it out.

    Attributes:
        name: in the source; empty when the compiler did not record it.
        offset: in the kernarg segment, in bytes.
        size: in bytes.
        kind: `global_buffer` for a pointer, `by_value` for a scalar.
    """

    name: str
    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Change:
    """One resource that differs between two builds. `verdict` is `better`, `worse`, or else `changed`."""

    field: str
    before: int | None
    after: int | None
    verdict: str


def occupancy(arch: Arch, vgprs: int, lds_bytes: int, threads: int) -> int:
    """Waves that one SIMD can hold at a time, as registers and LDS allow. The compiler's remark says the
    same.

    gfx1100 has 1536 VGPRs a SIMD, given out by 24, and 128 KiB of LDS for the 4 SIMDs of a WGP. A kernel with
    109 VGPRs and 16 KiB of LDS in workgroups of 64 threads (2 waves): 109 rounds up to 120, 1536 // 120 = 12
    waves by registers; 128 // 16 = 8 workgroups by LDS, 16 waves on 4 SIMDs, 4 each. Occupancy 4.

    Args:
        arch: the row of the arch table.
        vgprs: vector registers of a lane.
        lds_bytes: LDS of a workgroup.
        threads: threads of a workgroup.
    """
    granules = max(1, -(-vgprs // arch.vgpr_granule))
    waves = min(arch.max_waves, arch.vgpr_file // (granules * arch.vgpr_granule))
    if lds_bytes:
        workgroups = arch.lds_pool_bytes // lds_bytes
        waves = min(waves, -(-workgroups * -(-threads // WAVE) // arch.simds))
    if arch.max_workgroups:
        waves = min(waves, -(-arch.max_workgroups * -(-threads // WAVE) // arch.simds))
    return waves


P = ParamSpec("P")
R = TypeVar("R")


def reader(read: Callable[P, R]) -> Callable[P, R]:
    """For a function that reads a compiler's output: whatever it trips over in a damaged file is a ToolchainError."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except HipfireError:
            raise
        except Exception as error:  # of the parsers, or of what they made of nonsense
            raise ToolchainError(f"the compiler's output cannot be read: {type(error).__name__}: {error}") from error

    return reading


@reader
def read_resources(code: bytes, arch: Arch, entry: str) -> Resources:
    """Resources of the kernel `entry` in a gfx code object.

    Raises:
        ToolchainError: it is no code object, or has no such kernel.
    """
    elf = open_elf(code)
    kernel = _kernel(elf, entry)
    vgprs, lds, threads = (
        kernel[name] for name in (".vgpr_count", ".group_segment_fixed_size", ".max_flat_workgroup_size")
    )
    return Resources(
        vgprs=vgprs,
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel.get(".vgpr_spill_count"),  # a compiler may leave out these two
        sgpr_spills=kernel.get(".sgpr_spill_count"),
        scratch_bytes=kernel[".private_segment_fixed_size"],
        lds_bytes=lds,
        kernarg_bytes=kernel[".kernarg_segment_size"],
        wavefront=kernel[".wavefront_size"],
        max_workgroup=threads,
        occupancy=occupancy(arch, vgprs, lds, threads),
        code_bytes=_symbol_size(elf, entry),
    )


@reader
def read_args(code: bytes, entry: str) -> tuple[KernelArg, ...]:
    """The arguments of the kernel `entry`, without those the runtime adds behind them.

    Raises:
        ToolchainError: as `read_resources`.
    """
    return tuple(
        KernelArg(arg.get(".name", ""), arg[".offset"], arg[".size"], arg[".value_kind"])
        for arg in _kernel(open_elf(code), entry).get(".args", ())
        if not arg[".value_kind"].startswith("hidden_")
    )


def diff(before: Resources, after: Resources) -> tuple[Change, ...]:
    """What changed from one build of a kernel to another."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in FIELDS)
    return tuple(Change(name, old, new, _verdict(name, old, new)) for name, old, new in pairs if old != new)


def _verdict(name: str, before: int | None, after: int | None) -> str:
    if before is None or after is None or name not in _HIGHER_IS_BETTER + _LOWER_IS_BETTER:
        return "changed"
    return "better" if (after > before) == (name in _HIGHER_IS_BETTER) else "worse"


def open_elf(code: bytes) -> Any:
    """The ELF file. ToolchainError: it is none."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        return ELFFile(io.BytesIO(code))
    except ELFError as error:
        raise ToolchainError(f"the compiler's output ({len(code)} bytes) is not a code object: {error}") from error


def _kernel(elf: Any, entry: str) -> dict[str, Any]:
    """The metadata of one kernel."""
    import msgpack

    notes = (note for segment in elf.iter_segments() if segment["p_type"] == "PT_NOTE" for note in segment.iter_notes())
    kernels = [
        kernel
        for note in notes
        if note["n_name"] == "AMDGPU" and note["n_type"] == _NOTE_TYPE
        for kernel in msgpack.unpackb(note["n_desc"])["amdhsa.kernels"]
    ]
    for kernel in kernels:
        if kernel[".name"] == entry:
            return dict(kernel)
    names = ", ".join(kernel[".name"] for kernel in kernels) or "none"
    raise ToolchainError(f"the code object has no kernel {entry!r}; kernels in it: {names}")


def _symbol_size(elf: Any, entry: str) -> int:
    """Bytes of a function."""
    found = elf.get_section_by_name(".dynsym").get_symbol_by_name(entry)
    return int(found[0]["st_size"]) if found else 0
