"""The memory check of the host device: a launch in which an access outside of an array is an error where it happens.

The kernel runs on copies of its arrays. Each ends at a page that nobody may touch, and so does each LDS array; what it
only reads cannot be written. Then blocks run again with arrays that begin right behind such a page, and with other
bytes in the LDS that nobody has written: what they write must come out the same to the bit, or the kernel has read what
is not its own. Whoever launches finds the results in the arrays, and after an error the arrays as they were.

No access is instrumented: the processor faults, and the kernel's runtime names block, thread and instruction
(`templates/faults_host.h`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hipfire_kernels.authoring.args import LDS_TYPES
from hipfire_kernels.errors import DeviceError, MemoryFault
from hipfire_kernels.running.devices.guarded import OTHER, Copies, LdsArray, Under
from hipfire_kernels.running.devices.protocol import KernelArgs, Launch

AGAIN, FEW = 4, 8
"""Of how many blocks one runs again, in stretches all over the grid and at its corners; in a grid of few all do."""


Stretch = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Blocks to be run by one OS thread: the first and the last of each stretch, by their number in the grid."""

    args: KernelArgs
    stretches: tuple[Stretch, ...]
    under: Under | None = None


Run = Callable[[Sequence[Part]], None]
"""Runs all parts, on as many OS threads as there are, and raises the first failure by their order."""


def unsupported() -> str:
    """Why kernels cannot be checked on this machine; empty where they can."""
    if sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64"):
        return ""
    return f"the memory check of kernels needs Linux on x86-64; this is {sys.platform} on {platform.machine()}"


_handling = threading.Lock()


def _in_forked_child() -> None:
    global _handling
    _handling = threading.Lock()  # who held the other one stayed in the parent


os.register_at_fork(after_in_child=_in_forked_child)


@contextlib.contextmanager
def handled(shared_object: Any) -> Iterator[None]:
    """Have a kernel's runtime handle the faults of this process. One at a time: handlers must go as they came."""
    with _handling:
        shared_object.hk_handle_faults(1)
        try:
            yield
        finally:
            shared_object.hk_handle_faults(0)


@dataclass(frozen=True)
class Check:
    """A launch under the check.

    Attributes:
        entry: the kernel's name.
        lds: its LDS arrays.
        run: what runs parts of the launch.
    """

    launch: Launch
    entry: str
    lds: tuple[LdsArray, ...]
    run: Run

    def __call__(self, stretches: Sequence[Stretch]) -> None:
        """Run it, and leave its results in the arrays it was launched with.

        Args:
            stretches: first and last of the blocks that one OS thread takes at a time.

        Raises:
            MemoryFault: it touches what it must not.
            DeviceError: it was broken off for another reason, say by a deadlock.
        """
        first, second = self._under(True), self._under(False, changed=self._lds_bytes)
        few = self._total <= FEW
        again = list(stretches) if few else self._some(stretches)
        parts = [Part(first.copies.args, (one,), first) for one in stretches]
        threads = max(1, len(stretches) // AGAIN)
        parts += [Part(second.copies.args, tuple(again[n::threads]), second) for n in range(threads)]
        self.run(parts)
        for one in (first, second):
            if said := one.copies.behind():
                raise MemoryFault(f"{self.entry}: {said}")
        if difference(first.copies, second.copies, some=not few):
            self._explain()
        else:
            first.copies.give()

    @property
    def _total(self) -> int:
        return math.prod(self.launch.grid)

    @property
    def _lds_bytes(self) -> int:
        return max((one.offset + one.padded for one in self.lds), default=0)

    def _some(self, stretches: Sequence[Stretch]) -> list[Stretch]:
        """The first part of each stretch, and the corners of the grid: an index that rises or falls with the block in
        each direction is least and greatest there."""
        found = [(first, first + last // AGAIN - first // AGAIN) for first, last in stretches]
        x, y, _ = self.launch.grid
        for corner in itertools.product(*((0, extent - 1) for extent in self.launch.grid)):
            block = corner[0] + x * (corner[1] + y * corner[2])
            if not any(first <= block < last for first, last in found):
                found.append((block, block + 1))
        return found

    def _under(self, at_end: bool, **how: Any) -> Under:
        return Under(Copies(self.launch.args, at_end), at_end, **how)

    # ---- two runs have differed -------------------------------------------------------------------------------------

    def _explain(self) -> None:
        """Say why, by runs of one block behind the other. A kernel that differs by the order of its blocks alone, for
        it adds to memory in turn with others, has no fault; the results are then those of one such run."""
        base = self._alone(True)
        if self.lds and difference(base, self._alone(True, changed=self._lds_bytes)):
            raise self._unwritten(base)
        if where := difference(base, self._alone(False)):
            raise MemoryFault(f"{self.entry}: {where} depends on {self._beside(base)}")
        base.give()

    def _alone(self, at_end: bool, blocks: Stretch | None = None, **how: Any) -> Copies:
        """The arrays after a run on one OS thread."""
        under = self._under(at_end, **how)
        self.run([Part(under.copies.args, (blocks or (0, self._total),), under)])
        return under.copies

    def _mixed(self, blocks: int) -> Copies:
        """The arrays after a run in which the first blocks have other bytes in their LDS than the rest."""
        changed = self._under(True, changed=self._lds_bytes)
        self.run([Part(changed.copies.args, ((0, blocks),), changed)])
        self.run([Part(changed.copies.args, ((blocks, self._total),), Under(changed.copies, True))])
        return changed.copies

    def _unwritten(self, base: Copies) -> MemoryFault:
        """A read of LDS that nobody wrote: which block, element, thread and line, as far as they can be told."""
        block = least(lambda n: bool(difference(base, self._mixed(n))), self._total) - 1
        only = (block, block + 1)
        one = self._alone(True, only)

        def differs(nbytes: int) -> str:
            return difference(one, self._alone(True, only, changed=nbytes))

        x, y, _ = self.launch.grid
        at = f"{self.entry}, block {(block % x, block // x % y, block // x // y)}"
        if not differs(self._lds_bytes):
            where = difference(base, self._mixed(block + 1))
            return MemoryFault(f"{at}: {where} depends on LDS that nobody has written; {_ADVICE}")
        byte = least(lambda n: bool(differs(n)), self._lds_bytes) - 1
        array = next(one for one in reversed(self.lds) if one.offset <= byte)
        element = (byte - array.offset) // LDS_TYPES[array.ctype]
        what = f"{array.name}[{element}] ({array.ctype} in LDS, {array.count} elements) before anybody has written it"
        spoiled = f"with other bytes there {differs(byte + 1)} comes out different; {_ADVICE}"
        read = self._reader(array, element, only)
        if read is None:
            return MemoryFault(f"{at}: reads {what}; {spoiled}", array=array.name, index=element)
        what = what.replace(f"[{element}]", f"[{read.index}]")
        return MemoryFault(
            f"{at}, thread {read.thread}: reads {what}{f', at {read.place}' if read.place else ''}; {spoiled}",
            **{name: getattr(read, name) for name in ("array", "index", "thread", "place")},
        )

    def _reader(self, array: LdsArray, element: int, only: Stretch) -> MemoryFault | None:
        """The first thread that touches this element or one behind it, if it reads: nobody can have written it."""
        under = self._under(True, cut=(array, element * LDS_TYPES[array.ctype]))
        try:
            self.run([Part(under.copies.args, (only,), under)])
        except MemoryFault as fault:
            return fault if fault.array == array.name and not fault.writes else None
        except DeviceError:  # it waits for what this thread would have done
            pass
        return None

    def _beside(self, base: Copies) -> str:
        for one in self.launch.args.described():
            copies = Copies(self.launch.args, True, {one.name: OTHER})
            self.run([Part(copies.args, ((0, self._total),), Under(copies, True))])
            if difference(base, copies):
                return f"what lies beside {one.name} ({one}): it is read outside of its bounds"
        return "where in memory the arrays lie: one is read outside of its bounds, or an address is computed with"


_ADVICE = "a barrier is missing, or it is never written"


def least(holds: Callable[[int], bool], most: int) -> int:
    """A number from 1 to `most` for which something holds, and does not for the one before. For `most` it does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def difference(ours: Copies, theirs: Copies, *, some: bool = False) -> str:
    """The first element that two runs leave with other bits, in words; empty when there is none.

    Args:
        some: of theirs, not all blocks have run: elements that are as they were given do not count.
    """
    for (one, given, mine), (_, _, other) in zip(ours.written(), theirs.written(), strict=True):
        apart = mine != other
        if some:
            apart &= other != given
        if apart.any():
            return f"{one.name}{list(map(int, np.unravel_index(int(apart.argmax()), one.shape)))}"
    return ""
