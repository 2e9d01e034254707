"""From an instruction of a shared object to the lines of the source it comes from, inlined calls included."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from typing import Any

from hipfire_kernels.authoring.places import Place


def frames(code: bytes, address: int) -> tuple[Place, ...]:
    """The lines that an instruction belongs to: its own first, then that of each call that was inlined.

    Args:
        code: an ELF file with a line table (`-gline-tables-only`).
        address: of the instruction, as in the file.

    Returns:
        Nothing where the file has no line for it. What the compiler made of no line in particular has those of the
        calls alone.
    """
    with _reading:
        for unit in _units(code):
            own = unit.line(address)
            if own is not None:
                return tuple(place for place in (own, *unit.calls(address)) if place.line)
    return ()


def near(code: bytes, address: int) -> Place | None:
    """The line of the closest instruction ahead of one that the compiler made of no line in particular, say of two
    loads at once; None where there is none."""
    with _reading:
        for unit in _units(code):
            if unit.line(address) is not None:
                return unit.line_before(address)
    return None


_reading = threading.Lock()  # a file that is read has one position


def symbol(code: bytes, name: str) -> int:
    """The address of an exported symbol, as in the file."""
    found = _elf(code).get_section_by_name(".dynsym").get_symbol_by_name(name)
    return int(found[0]["st_value"])


def text(code: bytes) -> range:
    """The addresses of the instructions, as in the file."""
    section = _elf(code).get_section_by_name(".text")
    return range(section["sh_addr"], section["sh_addr"] + section["sh_size"])


def _elf(code: bytes) -> Any:
    from elftools.elf.elffile import ELFFile

    return ELFFile(io.BytesIO(code))


class _Unit:
    """One unit of the debug information."""

    def __init__(self, info: Any, unit: Any) -> None:
        self._info, self._unit = info, unit
        self._program = info.line_program_for_CU(unit)

    def line(self, address: int) -> Place | None:
        before = None
        for entry in self._program.get_entries():
            state = entry.state
            if state is None:
                continue
            if before is not None and before.address <= address < state.address:
                return self._place(before.file, before.line)
            before = None if state.end_sequence else state
        return None

    def line_before(self, address: int) -> Place | None:
        found = None
        for entry in self._program.get_entries():
            state = entry.state
            if state is None or state.end_sequence:
                continue
            if state.address > address:
                break
            found = self._place(state.file, state.line) if state.line else found
        return found

    def calls(self, address: int) -> list[Place]:
        """Where the function that the instruction belongs to was inlined, and where that one was, inside out."""
        found = []
        for die in self._around(self._unit.get_top_DIE(), address):
            if die.tag == "DW_TAG_inlined_subroutine":
                file, line = (die.attributes[f"DW_AT_call_{part}"].value for part in ("file", "line"))
                found.append(self._place(file, line))
        return found[::-1]

    def _around(self, die: Any, address: int) -> Iterator[Any]:
        for child in die.iter_children():
            if any(low <= address < high for low, high in self._ranges(child)):
                yield child
                yield from self._around(child, address)

    def _ranges(self, die: Any) -> Iterator[tuple[int, int]]:
        given = die.attributes
        if "DW_AT_ranges" in given:
            lists = self._info.range_lists()
            for one in lists.get_range_list_at_offset(given["DW_AT_ranges"].value, cu=self._unit):
                yield one.begin_offset, one.end_offset
        elif "DW_AT_low_pc" in given and "DW_AT_high_pc" in given:
            low, high = given["DW_AT_low_pc"].value, given["DW_AT_high_pc"]
            yield low, high.value if high.form == "DW_FORM_addr" else low + high.value

    def _place(self, number: int, line: int) -> Place:
        header = self._program.header
        first = 0 if header["version"] >= 5 else 1
        entry = header["file_entry"][number - first]
        folder = header["include_directory"][entry.dir_index - first] if entry.dir_index else b""
        return Place("/".join(part.decode() for part in (folder, entry.name) if part), line)


@functools.lru_cache(maxsize=1)
def _units(code: bytes) -> list[_Unit]:
    """Those of the last file asked for stay: an error may ask for several of its lines."""
    info = _elf(code).get_dwarf_info()
    return [_Unit(info, unit) for unit in info.iter_CUs()]
