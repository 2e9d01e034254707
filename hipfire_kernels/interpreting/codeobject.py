"""What a launch needs to know of a code object: its kernel descriptor, its arguments, its instructions' bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hipfire_kernels.building.resources import KernelArg, open_elf, read_args, reader
from hipfire_kernels.errors import DeviceError, ToolchainError

_KERNARG_ALONE = 1 << 3
_USER_REGISTERS = 0b111_1111
_WAVE32 = 1 << 10
_F32_ROUND_AND_SUBNORMAL = 0xF0
"""As HIP has them: rounds to nearest, keeps subnormal numbers."""


@dataclass(frozen=True)
class Descriptor:
    """A kernel descriptor (LLVM's "User Guide for AMDGPU Backend", "Kernel Descriptor") and its arguments.

    Attributes:
        lds_bytes: LDS of a workgroup.
        kernarg_bytes: of the segment that holds the arguments.
        user_sgprs: scalar registers that are set before those of the workgroup's index.
        ids: bits of x, y, z, for which the workgroup's index comes in a register (gfx11).
        ieee: whether NaN that signal are made quiet (gfx11).
        args: where each argument lies.
    """

    lds_bytes: int
    kernarg_bytes: int
    user_sgprs: int
    ids: int
    ieee: bool
    args: tuple[KernelArg, ...]


def read_descriptor(code: bytes, entry: str, gfx12: bool) -> Descriptor:
    """The descriptor of a kernel.

    Raises:
        DeviceError: it asks for what the interpreter does not give: scratch, wave64, other user registers, arguments
            that a runtime adds.
        ToolchainError: it is no code object, or has no such kernel.
    """
    raw = _descriptor(code, entry)
    group, private, kernarg = struct.unpack_from("<III", raw)
    rsrc1, rsrc2 = struct.unpack_from("<II", raw, 48)
    (properties,) = struct.unpack_from("<H", raw, 56)
    wants = [
        (private != 0, f"{private} bytes of scratch a lane"),
        (not properties & _WAVE32, "waves of 64 lanes"),
        (properties & _USER_REGISTERS != _KERNARG_ALONE, f"user registers beside its arguments ({properties:#x})"),
        (rsrc1 >> 12 & 0xFF != _F32_ROUND_AND_SUBNORMAL, f"float mode {rsrc1 >> 12 & 0xFF:#x}"),
        (rsrc2 >> 11 & 3 != 0, "workgroups of more than one dimension"),
    ]
    for refused, what in wants:
        if refused:
            raise DeviceError(f"{entry} asks for {what}; the interpreter has none of that")
    args = read_args(code, entry)
    if args and kernarg < max(arg.offset + arg.size for arg in args):
        raise ToolchainError(f"{entry}: its arguments do not fit into their {kernarg} bytes")
    return Descriptor(group, kernarg, rsrc2 >> 1 & 31, rsrc2 >> 7 & 7, not gfx12 and bool(rsrc1 >> 23 & 1), args)


@reader
def _descriptor(code: bytes, entry: str) -> bytes:
    elf = open_elf(code)
    found = elf.get_section_by_name(".dynsym").get_symbol_by_name(f"{entry}.kd")
    if not found:
        raise ToolchainError(f"the code object has no kernel {entry!r}")
    address = found[0]["st_value"]
    for segment in elf.iter_segments():
        start = segment["p_vaddr"]
        if segment["p_type"] == "PT_LOAD" and start <= address < start + segment["p_filesz"]:
            return bytes(segment.data()[address - start :][:64])
    raise ToolchainError(f"the descriptor of {entry!r} is in no segment")


@reader
def instructions(code: bytes) -> bytes:
    """The bytes of all instructions of an object."""
    return bytes(open_elf(code).get_section_by_name(".text").data())
