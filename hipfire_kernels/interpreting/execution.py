"""One launch on the machine: its arguments as the code object wants them, its blocks over the cores."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.interpreting import findings, native
from hipfire_kernels.interpreting.findings import Array
from hipfire_kernels.interpreting.program import Program
from hipfire_kernels.running.workers import CORES, Workers

_TURN = 256
"""Instructions after which another wave may have its turn, at most. Each turn's number is drawn."""

_MOST = 200_000_000
"""Instructions of a wave that ends: the longest of a test takes a hundredth."""

_UNSET = 0xEE
"""What is in the argument segment between the arguments."""

_workers = Workers(CORES, "hipfire-wave")


@dataclass(frozen=True)
class Mode:
    """How the machine runs.

    Attributes:
        flushed: whether the matrix unit takes subnormal f16 operands for zero. What cards do is not published.
        seed: of the order in which the waves of a block take turns.
    """

    flushed: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """A launch, with nothing left to decide.

    Attributes:
        values: the bytes of each argument, in the order of the code object.
        arrays: those it may access, None where nobody has said.
        memory: otherwise what may be accessed: addresses from and to.
    """

    program: Program
    grid: tuple[int, int, int]
    threads: int
    values: tuple[bytes, ...]
    arrays: tuple[Array, ...] | None
    memory: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Executed:
    """How often each of a program's instructions has run, for how many lanes in all."""

    runs: npt.NDArray[np.uint64]
    lanes: npt.NDArray[np.uint64]


def run(call: Call, mode: Mode) -> Executed:
    """Run all blocks of a launch.

    Raises:
        DeadlockError, MemoryFault, UndefinedBehaviour: something was found; by block, the first.
    """
    segment = _segment(call)
    launch, kept = _launch(call, mode, segment)
    blocks = call.grid[0] * call.grid[1] * call.grid[2]
    parts = 1 if CORES == 1 else min(blocks, 4 * CORES)
    stretches = list(itertools.pairwise([blocks * i // parts for i in range(parts + 1)] if blocks else []))
    program = call.program.native(call.threads)
    if len(stretches) == 1:
        outcomes = [_stretch(program, launch, *stretches[0])]
    else:
        jobs = [_workers.threads.submit(_stretch, program, launch, *one) for one in stretches]
        try:
            outcomes = [job.result() for job in jobs]
        finally:
            wait(jobs)  # interrupted: no block may run on with arguments that are gone
    del kept
    for outcome, _ in outcomes:
        if found := findings.read(outcome, call.program, call.arrays or ()):
            raise findings.error(found)
    runs, lanes = (_sum([ran[i] for _, ran in outcomes]) for i in (0, 1))
    return Executed(runs, lanes)


def _sum(counts: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    total: npt.NDArray[np.uint64] = counts[0].copy()
    for one in counts[1:]:
        total += one
    return total


def _stretch(program: Any, launch: Any, first: int, last: int) -> tuple[Any, tuple[npt.NDArray[np.uint64], ...]]:
    """Some blocks: what was found, and what has run."""
    ffi = native.ffi()
    ran = np.zeros(program.count, np.uint64), np.zeros(program.count, np.uint64)
    outcome = ffi.new("hk_outcome*")
    outcome.runs, outcome.lanes = (ffi.cast("unsigned long long*", one.ctypes.data) for one in ran)
    if not native.machine().hk_machine_run(program, launch, first, last, outcome):
        raise DeviceError("no memory for the registers and the LDS of a block")
    return outcome, ran


def _segment(call: Call) -> npt.NDArray[np.uint8]:
    """The arguments, each at its offset."""
    nbytes = -(-max(1, call.program.descriptor.kernarg_bytes) // 16) * 16  # loads of constants take whole words of four
    segment = np.full(nbytes, _UNSET, np.uint8)
    for arg, value in zip(call.program.descriptor.args, call.values, strict=True):
        segment[arg.offset : arg.offset + arg.size] = np.frombuffer(value, np.uint8)
    return segment


def _launch(call: Call, mode: Mode, segment: npt.NDArray[np.uint8]) -> tuple[Any, Any]:
    """The `hk_launch`, and what has to live as long."""
    ffi = native.ffi()
    if call.arrays is None:
        extents = [(start, end, 1) for start, end in call.memory]
    else:
        extents = [(a.address, a.address + a.argument.nbytes, int(a.argument.writes)) for a in call.arrays]
    kernarg = segment.ctypes.data
    extents.append((kernarg, kernarg + len(segment), 0))
    listed = ffi.new("hk_extent[]", [one for one in extents if one[0] < one[1]])
    launch = ffi.new("hk_launch*")
    launch.grid = call.grid
    launch.flushed, launch.kernarg, launch.seed = mode.flushed, kernarg, mode.seed
    launch.most, launch.turn = _MOST, _TURN
    launch.extents, launch.extent_count = listed, len(listed)
    return launch, (listed, segment)


def arguments(program: Program, params: int) -> tuple[bytes, ...]:
    """The bytes of the arguments that an array of pointers points to, as a launch API has it."""
    args = program.descriptor.args
    pointers = (ctypes.c_void_p * len(args)).from_address(params)
    return tuple(ctypes.string_at(p or 0, arg.size) for p, arg in zip(pointers, args, strict=True))


def refuse_shape(program: Program, grid: Sequence[int], threads: int) -> None:
    """What a runtime refuses of a launch before it begins.

    Raises:
        DeviceError: an empty or too large grid, or more threads than the kernel was compiled for.
    """
    if not 0 < threads <= program.threads:
        raise DeviceError(f"{threads} threads a block; the kernel was compiled for up to {program.threads}")
    if min(grid) < 1 or max(grid[1:]) > 65535 or grid[0] * threads >> 32:
        raise DeviceError(f"grid {tuple(grid)} of {threads} threads; required: 1 to 65535 along y and z, and along x")
