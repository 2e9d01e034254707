"""What a kernel takes from an NVIDIA card, read from its cubin.

Registers and the local-memory frame are attributes of `.nv.info` (EIATTR_REGCOUNT and EIATTR_FRAME_SIZE, each a symbol
and a value); code and arguments are sections of the kernel's own.
"""

from __future__ import annotations

import struct
from typing import Any

from hipfire_kernels.archs import Arch
from hipfire_kernels.building.resources import Resources, occupancy, open_elf, reader
from hipfire_kernels.errors import ToolchainError

_SIZED = 4
"""Format byte of an attribute whose value has its size in front."""
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_RESERVED_CONSTANTS = {"sm_90": 0x210}
"""Bytes of constant bank 0 in front of the kernel's arguments."""


@reader
def read_cubin(code: bytes, arch: Arch, entry: str, lds_bytes: int, threads: int) -> Resources:
    """Resources of the kernel `entry`.

    Spills live in the local-memory frame, with everything else a lane keeps in memory: `scratch_bytes` covers both.

    Args:
        lds_bytes: shared memory the kernel declares; the section also holds what the system reserves.
        threads: threads of a block.

    Raises:
        ToolchainError: it is no cubin, or has no such kernel.
    """
    elf = open_elf(code)
    text, constants, info = (
        elf.get_section_by_name(name) for name in (f".text.{entry}", f".nv.constant0.{entry}", ".nv.info")
    )
    symbol = _symbol_index(elf, entry)
    if text is None or constants is None or info is None or symbol is None:
        raise ToolchainError(f"the cubin has no kernel {entry!r}")
    values = dict(_attributes(info.data(), symbol))
    if _REGCOUNT not in values:
        raise ToolchainError(f"the cubin does not say what registers {entry!r} takes")
    registers = values[_REGCOUNT]
    return Resources(
        vgprs=registers,
        scratch_bytes=values.get(_FRAME_SIZE, 0),
        lds_bytes=lds_bytes,
        kernarg_bytes=constants["sh_size"] - _RESERVED_CONSTANTS[arch.name],
        wavefront=32,
        max_workgroup=threads,
        occupancy=occupancy(arch, registers, lds_bytes, threads),
        code_bytes=text["sh_size"],
    )


def _symbol_index(elf: Any, entry: str) -> int | None:
    symbols = elf.get_section_by_name(".symtab").iter_symbols()
    return next((index for index, symbol in enumerate(symbols) if symbol.name == entry), None)


def _attributes(data: bytes, symbol: int) -> list[tuple[int, int]]:
    found = []
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != _SIZED:
            continue
        if size == 8:
            owner, value = struct.unpack_from("<II", data, at)
            if owner == symbol:
                found.append((attribute, value))
        at += size
    return found
