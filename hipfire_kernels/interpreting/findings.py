"""What the machine found, in words: the kernel, the block and wave, what is wrong, the line, the instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hipfire_kernels.errors import DeadlockError, DeviceError, MemoryFault, UndefinedBehaviour
from hipfire_kernels.interpreting import table
from hipfire_kernels.interpreting.program import Program
from hipfire_kernels.running.devices.protocol import DTYPES, Argument

_VECTORS = 256
_SPECIAL = {106: "vcc_lo", 107: "vcc_hi", 124: "null", 125: "m0", 126: "exec_lo", 127: "exec_hi"}
_COUNTERS = {
    False: ("its loads (vmcnt)", "LDS (lgkmcnt)", "its constants (lgkmcnt)", "its stores (vscnt)"),
    True: ("its loads (loadcnt)", "LDS (dscnt)", "its constants (kmcnt)", "its stores (storecnt)"),
}
_DEADLOCKS = {"NOT_WAITED", "NOT_SIGNALLED", "MISSED_BARRIER", "BARRIERS_DIFFER", "ENDLESS"}
_FAULTS = {"OUTSIDE", "OUTSIDE_LDS", "READ_ONLY"}
_SHOWN = 8
_MOST_WAVES = 32


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: its name in `machine/findings.h`.
        op: the machine's instruction.
        thread: the lane's, of the block; None where it is the wave's.
        text: the whole of it, in words.
        array, index: of an access beside an array: which, and the element.
    """

    kind: str
    op: int
    thread: int | None
    text: str
    array: str = ""
    index: int = 0


@dataclass(frozen=True)
class Array:
    """An array of a launch: where it is, and what is declared of it."""

    address: int
    argument: Argument

    def near(self, address: int) -> int:
        """Bytes between an address and it; 0 inside."""
        return max(self.address - address, address - self.address - self.argument.nbytes + 1, 0)

    def element(self, address: int) -> int:
        """The element that an address is of, counted from the array's start."""
        return (address - self.address) // DTYPES[self.argument.dtype].itemsize


def read(outcome: Any, program: Program, arrays: Sequence[Array]) -> list[Finding]:
    """What an `hk_outcome` says."""
    return [_finding(outcome.found[i], program, arrays) for i in range(outcome.count)]


def _finding(found: Any, program: Program, arrays: Sequence[Array]) -> Finding:
    kind = table.kinds()[found.kind]
    lane = None if found.lane < 0 else found.lane
    thread = None if lane is None else 32 * found.wave + lane
    said = kind.text.format(
        address=f"address {found.address:#x}",
        offset=found.address,
        bytes=found.other,
        align=found.other,
        lds=program.descriptor.lds_bytes,
        lane=lane,
        register=_register(found.reg),
        counter=_COUNTERS[program.gfx12][found.other] if found.other < 4 else "",
        wave=f"wave {found.other}" if found.other < _MOST_WAVES else "another wave",
        lanes=f"{found.other:#010x}",
    )
    array, index = "", 0
    if kind.name in ("OUTSIDE", "READ_ONLY", "RACE_ARRAY") and arrays:
        nearest = min(arrays, key=lambda one: one.near(found.address))
        array, index = nearest.argument.name, nearest.element(found.address)
        said += f": {array}[{index}] of {array} ({nearest.argument})"
    who = f"wave {found.wave}" if thread is None else f"thread {thread}"
    at = f"{program.entry} on {program.arch.name}, block {tuple(found.block)}, {who}"
    return Finding(kind.name, found.op, thread, f"{at}: {said}, {_where(program, found.op)}", array, index)


def _register(reg: int) -> str:
    if reg < _VECTORS:
        return f"v{reg}"
    scalar = reg - _VECTORS
    return _SPECIAL.get(scalar, f"ttmp{scalar - 108}" if scalar >= 108 else f"s{scalar}")


def _where(program: Program, op: int) -> str:
    line, body = program.line(op), program.body(op)
    called = "" if body in (line, type(line)()) else f", called at {body}: {program.places.text(body)!r}"
    return f"at {line}: {program.places.text(line)!r}{called} [{program.instruction(op).text}]"


def error(found: Sequence[Finding]) -> DeviceError:
    """The error for what a launch gave: the first finding's, with the others below it."""
    first = found[0]
    more = [one.text for one in found[1:_SHOWN]]
    left = len(found) - _SHOWN
    text = "\n".join([first.text, *more, *([f"and {left} more"] if left > 0 else [])])
    if first.kind in _DEADLOCKS:
        return DeadlockError(text)
    if first.kind in _FAULTS:
        return MemoryFault(text, array=first.array, index=first.index, thread=first.thread or 0)
    return UndefinedBehaviour(text)
