"""A kernel of a code object as the machine takes it: its instructions decoded, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.archs import Arch
from hipfire_kernels.authoring.places import NOWHERE, Place, Places
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.inspecting.isa import Instruction, Listing, parse
from hipfire_kernels.interpreting import codeobject, decode, native
from hipfire_kernels.interpreting.decode import Op, Source, UnknownInstruction

_LANES = 32
_TOOLCHAIN = "clang"


@dataclass(frozen=True)
class Program:
    """A kernel that can be run.

    Attributes:
        entry: the kernel's symbol.
        descriptor: what its launch needs to know.
        listing: its instructions.
        of_op: of each of the machine's instructions the index in `listing`; the halves of a `v_dual_` have the same.
        ops: the machine's instructions.
        threads: the most that a workgroup may have.
        places: the text of source lines.
    """

    entry: str
    arch: Arch
    descriptor: codeobject.Descriptor
    listing: Listing
    of_op: tuple[int, ...]
    ops: tuple[Op, ...]
    threads: int
    places: Places
    _kept: tuple[Any, ...]

    @property
    def gfx12(self) -> bool:
        """Whether it is for gfx12, rather than gfx11."""
        return _gfx12(self.arch)

    def native(self, threads: int) -> Any:
        """The `hk_program` for workgroups of so many threads. What it points to lives as long as this."""
        ops, maps, vgprs = self._kept
        made = native.ffi().new("hk_program*")
        made.ops, made.maps, made.count, made.vgprs = ops, maps, len(self.ops), vgprs
        made.lds_bytes, made.threads = self.descriptor.lds_bytes, threads
        made.user_sgprs, made.ids = self.descriptor.user_sgprs, self.descriptor.ids
        made.gfx12, made.ieee = self.gfx12, self.descriptor.ieee
        return made

    def instruction(self, op: int) -> Instruction:
        """What the compiler wrote of one of the machine's instructions."""
        return self.listing.instructions[self.of_op[op]]

    def line(self, op: int) -> Place:
        """The line that an instruction comes from; where the compiler names none, that of the one before."""
        for index in range(self.of_op[op], -1, -1):
            if self.listing.instructions[index].at.line:
                return self.listing.instructions[index].at
        return NOWHERE

    def body(self, op: int) -> Place:
        """The line of the kernel's body that an instruction belongs to."""
        for index in range(self.of_op[op], -1, -1):
            if self.listing.instructions[index].body.line:
                return self.listing.instructions[index].body
        return NOWHERE


def load(code: bytes, assembly: str, entry: str, arch: Arch, source: str, vgprs: int, threads: int) -> Program:
    """Read a kernel.

    Args:
        code: its code object.
        assembly: the text that assembles to it.
        source: the rendered source, for the text of lines.
        vgprs: vector registers of a lane.
        threads: the most that a workgroup may have.

    Raises:
        DeviceError: the assembly is another one's, or the kernel asks for what the interpreter has not; an unknown
            instruction is named with its line.
    """
    _same_code(code, assembly, entry, arch)
    return read(code, assembly, entry, arch, source, vgprs, threads)


def read(code: bytes, assembly: str, entry: str, arch: Arch, source: str, vgprs: int, threads: int) -> Program:
    """The same without assembling the text again: for one that was changed on purpose."""
    listing = parse(assembly, entry, arch.name, source)
    places = Places.of(source)
    ops, of_op = _decoded(listing, places)
    kept = _native_ops(listing, ops, of_op, vgprs)
    descriptor = codeobject.read_descriptor(code, entry, _gfx12(arch))
    return Program(entry, arch, descriptor, listing, tuple(of_op), tuple(ops), threads, places, kept)


def _gfx12(arch: Arch) -> bool:
    return arch.name.startswith("gfx12")


def _same_code(code: bytes, assembly: str, entry: str, arch: Arch) -> None:
    if not assembly:
        raise DeviceError(
            f"{entry} for {arch.name} has no assembly text, which the interpreter reads: hiprtc gives none, nor does a "
            "bundle keep it. Build it with the toolchain clang"
        )
    again = choose(arch, _TOOLCHAIN).assemble(assembly, arch)
    if codeobject.instructions(again) != codeobject.instructions(code):
        raise DeviceError(
            f"{entry} for {arch.name}: its assembly text does not assemble to its code, so that it says nothing of it. "
            "It is of another build, or from another assembler; build it anew"
        )


def _decoded(listing: Listing, places: Places) -> tuple[list[Op], list[int]]:
    ops: list[Op] = []
    of_op: list[int] = []
    gfx12 = listing.arch.startswith("gfx12")
    for index, one in enumerate(listing.instructions):
        try:
            made = decode.decode(one.text, gfx12)
        except UnknownInstruction as error:
            at = f"{one.at}: {places.text(one.at)!r}"
            raise UnknownInstruction(f"{listing.entry} for {listing.arch}: {error}; it is of {at}") from None
        ops += made
        of_op += [index] * len(made)
    return ops, of_op


def _native_ops(listing: Listing, ops: Sequence[Op], of_op: Sequence[int], vgprs: int) -> tuple[Any, Any, int]:
    first = {index: op for op, index in reversed([*enumerate(of_op)])}
    labels = {label: first[i] for i, one in enumerate(listing.instructions) for label in one.labels}
    maps: dict[tuple[int, ...], int] = {}
    numbers: dict[Place, int] = {}
    rows = []
    for op, index in zip(ops, of_op, strict=True):
        label = listing.targets.get(index)
        rows.append(
            {
                "code": op.row.code,
                "flags": op.flags,
                "result": op.result,
                "part": op.part,
                "reg": op.reg,
                "mask_reg": op.mask_reg,
                "map": maps.setdefault(op.lanes, len(maps)) if op.lanes else -1,
                "source": [_native_source(one) for one in op.sources],
                "offset": op.offset,
                "target": -1 if label is None else labels[label],
                "place": numbers.setdefault(listing.instructions[index].body, len(numbers)),
                "wait": op.wait,
            }
        )
    ffi = native.ffi()
    flat = [lane for lanes in maps for lane in lanes] or [0] * _LANES
    return ffi.new("hk_op[]", rows), ffi.new("signed char[]", flat), vgprs


def _native_source(one: Source) -> tuple[int, ...]:
    return (one.kind, one.part, one.mods, one.reg, one.needs, one.value)
