"""What a kernel's machine code executes, counted on the interpreter: instructions, bytes, matrix instructions, waits.

Counts say nothing of time: not how instructions overlap, nor what caches, clocks and latencies make of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hipfire_kernels.inspecting.isa import KINDS
from hipfire_kernels.running.devices.isa import IsaDevice, Trace

BYTES = MappingProxyType(
    {
        "global read": "bytes that lanes read from arrays, what several read counted for each",
        "global written": "bytes that lanes write to arrays",
        "LDS read": "bytes that lanes read from LDS",
        "LDS written": "bytes that lanes write to LDS",
        "constants": "bytes that waves read through the scalar unit",
    }
)
"""Traffic, as the instructions ask for it."""


@dataclass(frozen=True)
class Work:
    """What launches have executed.

    Attributes:
        instructions: of a wave, by the classes of `isa.KINDS`; a `v_dual_` is one.
        traffic: bytes, by the names of `BYTES`.
        by_name: instructions by what the assembler calls them, without their encoding.
    """

    instructions: Mapping[str, float]
    traffic: Mapping[str, float]
    by_name: Mapping[str, float]

    @property
    def total(self) -> float:
        """All instructions."""
        return sum(self.instructions.values())

    def scaled(self, factor: float) -> Work:
        """So many times as much."""
        return Work(*({name: x * factor for name, x in one.items()} for one in self._parts))

    def less(self, other: Work) -> Work:
        """What it has beyond another."""
        pairs = zip(self._parts, other._parts, strict=True)
        return Work(*({name: x - b.get(name, 0) for name, x in a.items()} for a, b in pairs))

    def with_all(self, other: Work) -> Work:
        """Both together."""
        return self.less(other.scaled(-1))

    @property
    def _parts(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
        return self.instructions, self.traffic, self.by_name


def count(device: IsaDevice, run: Callable[[], object]) -> dict[str, Work]:
    """What the launches of a call execute, by kernel.

    Args:
        run: the call; it has waited for its launches when it returns.
    """
    device.synchronize()
    device.driver.traces.clear()
    run()
    device.synchronize()
    return {trace.program.entry: of_trace(trace) for trace in device.driver.traces.values()}


def of_trace(trace: Trace) -> Work:
    """What one kernel has executed."""
    program, executed = trace.program, trace.executed
    instructions = Counter[str](dict.fromkeys(KINDS, 0))
    traffic = Counter[str](dict.fromkeys(BYTES, 0))
    names = Counter[str]()
    counted = -1
    for op, (row, index) in enumerate(zip((op.row for op in program.ops), program.of_op, strict=True)):
        runs, lanes = int(executed.runs[op]), int(executed.lanes[op])
        if index != counted:  # the halves of a v_dual_ are one instruction
            instructions[program.listing.instructions[index].kind] += runs
            names[row.name12 if program.gfx12 else row.name] += runs
            counted = index
        if row.kind == "MEMORY" and (kind := _traffic(row.space, row.operands)):
            traffic[kind] += lanes * row.nbytes * row.places
    return Work(dict(instructions), dict(traffic), dict(names))


def _traffic(space: str, access: str) -> str:
    """What of `BYTES` an access is; nothing for an exchange of lanes."""
    if space in ("CONSTANT", "LANES"):
        return "constants" if space == "CONSTANT" else ""
    writes = access in ("write", "writehigh", "add", "addfloat")
    return f"{'LDS' if space == 'SHARED' else 'global'} {'written' if writes else 'read'}"
