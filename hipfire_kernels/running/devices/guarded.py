"""Memory of a checked launch: copies of its arrays, and LDS arrays, beside pages that nobody may touch.

What lies within the last bytes up to an array's alignment has no page of its own: writes there are found afterwards,
reads where they change a result.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.args import LDS_TYPES
from hipfire_kernels.errors import DeviceError, MemoryFault
from hipfire_kernels.running.devices import memory
from hipfire_kernels.running.devices.pages import PAGE, Pages, rounded
from hipfire_kernels.running.devices.protocol import DTYPES, Argument, KernelArgs

FILL, OTHER = 0xFF, 0x5A
"""What LDS, and memory beside the arrays, holds before anybody writes it: NaN; the second time large finite numbers."""

AHEAD, LDS_AHEAD = 1 << 24, 1 << 16
"""Bytes that nobody may touch between two arrays, at least, and between two LDS arrays: a wrong stride ends there."""

_WIDEST = 16
"""Bytes of the widest access of a thread."""

_SI_KERNEL = 128
"""What Linux says of an access that is refused for another reason than its page."""


@dataclass(frozen=True)
class LdsArray:
    """An LDS array of a loaded kernel.

    Attributes:
        offset: where it lies with all of them behind each other.
        align: bytes its address must be a multiple of.
        nbytes: what its elements take.
    """

    name: str
    ctype: str
    offset: int
    align: int
    count: int
    nbytes: int

    @property
    def padded(self) -> int:
        """Bytes up to where one of the same alignment could begin."""
        return -(-self.nbytes // self.align) * self.align


@dataclass(frozen=True)
class Under:
    """How a run of blocks is checked.

    Attributes:
        copies: the arrays it runs on.
        at_end: whether LDS arrays end at a page that nobody may touch, or begin behind one.
        changed: so many bytes of LDS start as `OTHER`, the rest as `FILL`.
        cut: an LDS array and a byte of it from which on it may not be touched.
    """

    copies: Copies
    at_end: bool
    changed: int = 0
    cut: tuple[LdsArray, int] | None = None


# ---- copies of the arrays -------------------------------------------------------------------------------------------


class Copies:
    """Copies of all arrays of a launch between pages that nobody may touch.

    Args:
        args: with the declared arrays, of the launch as it was asked for.
        at_end: put each at the end of its pages, as far as its declared alignment allows; or at their beginning, as
            far from a multiple of 16 bytes as it was given: where a kernel asks for that, it finds both.
        beside: what the rest of an array's pages holds, by its name; by default `FILL` behind an array at the end of
            its pages, `OTHER` behind one at their beginning.

    Attributes:
        args: the same arguments with the copies' addresses.
    """

    def __init__(self, args: KernelArgs, at_end: bool, beside: Mapping[str, int] | None = None) -> None:
        self._given, self._at_end, self._beside = args, at_end, beside or {}
        self._arrays = args.described()
        self.at: dict[str, int] = {}
        self._slack: dict[str, tuple[int, int]] = {}  # bytes behind an array that are no page's, and what they hold
        groups = self._groups()
        nbytes = sum(group[0].nbytes for group in groups)
        if nbytes >= memory.WORTH_ASKING and nbytes > (left := memory.available()):
            raise DeviceError(f"{nbytes:,} bytes are not there for a checked launch's copies: {left:,} are left")
        ahead = max([AHEAD, *(rounded(one.nbytes) for one in self._arrays)])
        try:
            self._pages = Pages(ahead + sum(rounded(group[0].nbytes + _WIDEST) + ahead for group in groups))
            start = self._pages.address + ahead
            for group in groups:
                start = self._place(group, start) + ahead
        except OSError as error:
            raise DeviceError(f"no memory for a checked launch's copies of its arrays: {error.strerror}") from error
        values = list(args.values)
        for one in self._arrays:
            values[one.slot] = ctypes.c_void_p(self.at[one.name])
        self.args = KernelArgs(values, self._arrays)

    def _groups(self) -> list[list[Argument]]:
        """The arrays; those that are the same memory, as a kernel may allow, together."""
        groups: dict[Any, list[Argument]] = {}
        for one in self._arrays:
            groups.setdefault((self._source(one), one.nbytes) if one.nbytes else one.name, []).append(one)
        return list(groups.values())

    def _place(self, group: list[Argument], start: int) -> int:
        """Copy what is one array of memory to the pages from `start` on; where they end."""
        source, nbytes = self._source(group[0]), group[0].nbytes
        align, byte = max(one.align for one in group), self._poison(group)
        offset = rounded(nbytes) - nbytes if self._at_end else source % _WIDEST
        at = start + (offset // align * align if self._at_end else offset)
        end = start + rounded(at + nbytes - start)
        self._pages.allow(start, end - start)
        ctypes.memset(start, byte, at - start)
        ctypes.memmove(at, source, nbytes)
        ctypes.memset(at + nbytes, byte, end - at - nbytes)
        if not any(one.writes for one in group):
            self._pages.allow(start, end - start, write=False)
        for one in group:
            self.at[one.name] = at
            self._slack[one.name] = (-nbytes % align if nbytes else 0, byte)
        return end

    def _poison(self, group: list[Argument]) -> int:
        given = (self._beside[one.name] for one in group if one.name in self._beside)
        return next(given, FILL if self._at_end else OTHER)

    def _source(self, one: Argument) -> int:
        return self._given.values[one.slot].value or 0

    def __contains__(self, address: int) -> bool:
        return address in self._pages

    def nearest(self, address: int) -> Argument:
        """The array that an address between the pages is nearest to."""

        def apart(one: Argument) -> int:
            return max(self.at[one.name] - address, address - self.at[one.name] - one.nbytes, 0)

        return min(self._arrays, key=apart)

    def written(self) -> Iterator[tuple[Argument, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Each array that the kernel writes: the bits of its elements as they were given, and as they are."""
        for one in self._arrays:
            if one.writes and one.nbytes:
                yield one, _bits(one, self._source(one)), _bits(one, self.at[one.name])

    def behind(self) -> str:
        """What is written in the last bytes up to an array's alignment; empty when nothing is."""
        for one in self._arrays:
            nbytes, byte = self._slack[one.name]
            if ctypes.string_at(self.at[one.name] + one.nbytes, nbytes).strip(bytes([byte])):
                return f"{one.name} ({one}) is written behind its end"
        return ""

    def give(self) -> None:
        """Copy what was written to where the launch was asked to write it."""
        for _, given, now in self.written():
            given[...] = now


def _bits(one: Argument, address: int) -> npt.NDArray[Any]:
    """The elements as whole numbers, to be compared to the bit."""
    raw: Any = (ctypes.c_ubyte * one.nbytes).from_address(address)
    return np.frombuffer(raw, f"u{DTYPES[one.dtype].itemsize}")


# ---- LDS ------------------------------------------------------------------------------------------------------------


class LdsPages:
    """The LDS arrays of a block, each between pages that nobody may touch."""

    def __init__(self, arrays: tuple[LdsArray, ...]) -> None:
        self.arrays, self._starts = arrays, list[int]()
        self._pages = Pages(LDS_AHEAD + sum(rounded(one.padded) + LDS_AHEAD for one in arrays))
        start = self._pages.address + LDS_AHEAD
        for one in arrays:
            self._starts.append(start)
            self._pages.allow(start, one.padded)
            start += rounded(one.padded) + LDS_AHEAD

    def __contains__(self, address: int) -> bool:
        return address in self._pages

    def places(self, under: Under) -> list[tuple[int, int, int]]:
        """Address, and first and last byte that may be prepared, of each array."""
        return [self._place(one, start, under) for one, start in zip(self.arrays, self._starts, strict=True)]

    def _place(self, one: LdsArray, start: int, under: Under) -> tuple[int, int, int]:
        end = start + rounded(one.padded)
        if under.cut is not None and under.cut[0] == one:
            return end - under.cut[1], 0, under.cut[1]
        return end - one.padded if under.at_end else start, 0, one.padded

    def nearest(self, address: int, under: Under) -> tuple[LdsArray, int]:
        """The array that an address between the pages is nearest to, and the bytes from its start to there."""
        places = [at for at, _, _ in self.places(under)]
        found = min(
            zip(self.arrays, places, strict=True),
            key=lambda one: max(one[1] - address, address - one[1] - one[0].nbytes, 0),
        )
        return found[0], address - found[1]


_own = threading.local()
_LAYOUTS = 4
"""So many kernels' LDS an OS thread keeps: an attention kernel takes turns with its reducer."""


def lds_pages(arrays: tuple[LdsArray, ...]) -> LdsPages:
    """This OS thread's memory for LDS arrays.

    Raises:
        OSError: the process may have no more pages.
    """
    kept: dict[tuple[LdsArray, ...], LdsPages] = _own.__dict__.setdefault("lds", {})
    if arrays not in kept:
        if len(kept) >= _LAYOUTS:
            del kept[next(iter(kept))]
        kept[arrays] = LdsPages(arrays)
    return kept[arrays]


# ---- a fault in words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """A fault in words, as the end of a sentence that names the thread; and the array that is missed, if it is one."""

    text: str
    array: str = ""
    index: int = 0
    writes: bool = False

    def error(self, at: str, thread: int | None, lines: Sequence[str]) -> MemoryFault:
        """The error to raise.

        Args:
            at: kernel, block and thread.
            lines: of the instruction, inside out, with their text.
        """
        place = ", called at ".join(lines)
        text = f"{at}: {self.text}" + (f", at {place}" if place else "")
        return MemoryFault(
            text, array=self.array, index=self.index, writes=self.writes, thread=thread or 0, place=place
        )


@dataclass(frozen=True)
class Fault:
    """What the processor refused: signal, its code, and of an access the address and whether it writes."""

    signal: int
    code: int
    address: int
    writes: bool

    def said(self, under: Under, lds: LdsPages, stacks: range) -> Said:
        """What the kernel does.

        Args:
            stacks: addresses of the stacks of the block's threads, with a page in front of each that is refused.
        """
        if self.signal == signal.SIGFPE:
            return Said("divides a whole number by zero, or the least one by -1")
        if self.signal == signal.SIGILL:
            return Said("comes to what the compiler made of undefined behaviour")
        if self.code == _SI_KERNEL or self.signal == signal.SIGBUS:
            return Said("accesses a vector at an address that is not a multiple of its size, or at no address at all")
        if self.address in stacks:
            return Said("needs more stack than a thread has: a recursion, or arrays of its own that are too large")
        if self.address in lds:
            return self._beside_lds(*lds.nearest(self.address, under))
        if self.address in under.copies:
            return self._beside(under.copies)
        what = "a null pointer" if self.address < PAGE else f"address {self.address:#x}"
        return Said(f"{self._verb} through {what}, near none of its arrays", writes=self.writes)

    @property
    def _verb(self) -> str:
        return "writes" if self.writes else "reads"

    def _beside_lds(self, array: LdsArray, byte: int) -> Said:
        index = byte // LDS_TYPES[array.ctype]
        text = _beyond(array.name, f"{array.ctype} in LDS", index, array.count)
        return Said(f"{self._verb} {text}", array.name, index, self.writes)

    def _beside(self, copies: Copies) -> Said:
        one = copies.nearest(self.address)
        byte, size = self.address - copies.at[one.name], DTYPES[one.dtype].itemsize
        if 0 <= byte < one.nbytes:
            text = f"writes {one.name}[{byte // size}], and declares that it only reads {one.name} ({one})"
            return Said(text, one.name, byte // size, True)
        text = _beyond(one.name, str(one), byte // size, math.prod(one.shape))
        return Said(f"{self._verb} {text}", one.name, byte // size, self.writes)


def _beyond(name: str, kind: str, index: int, count: int) -> str:
    far, side = (-index, "before the start") if index < 0 else (index - count + 1, "behind the end")
    return f"{name}[{index}], {far} element{'s' if far > 1 else ''} {side} of {name} ({kind}, {count} elements)"


def overrun(array: LdsArray, byte: int) -> Said:
    """What was found behind an LDS array after the block: thread and line are not known."""
    index = array.count + byte // LDS_TYPES[array.ctype]
    text = _beyond(array.name, f"{array.ctype} in LDS", index, array.count)
    return Said(f"has written {text}", array.name, index, True)
