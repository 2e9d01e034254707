"""What the card says beside what the interpreter of its machine code says of the same inputs.

Whole numbers, conversions and quantised blocks are exact: they must have the same bits. Attention takes exponentials
and reciprocals, which a card approximates by tables of its own: there it is told how far the two are apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench.firstlight import checks, early, steps
from hipfire_kernels.bench.firstlight.steps import Job, Outcome
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.checking.matrix_arithmetic import arithmetic
from hipfire_kernels.checking.matrix_probe import probe
from hipfire_kernels.checking.oracle import check, oracle_of
from hipfire_kernels.checking.result import named
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import ABSENT, FAILED, PASSED
from hipfire_kernels.errors import DeviceError, ToolchainError, ToolchainUnavailable
from hipfire_kernels.kernels.arguments import QUANTIZE
from hipfire_kernels.running.devices import ISA
from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.gpu import GpuDevice

Arrays = Sequence[npt.NDArray[Any]]


def interpreter(job: Job) -> Outcome:
    """The trivial kernel, the matrix probe and one case of each family on both."""
    card = job.device
    if card.driver.vendor == ISA:
        return Outcome(ABSENT, ["this device is the interpreter: there is nothing to compare it with"])
    if card.arch.dialect != "amd":
        return Outcome(ABSENT, [f"there is no interpreter for {card.arch.name}"])
    try:
        choose(card.arch, "clang")
    except ToolchainUnavailable as error:
        return Outcome(ABSENT, [f"no offline compiler is here, whose code the interpreter runs: {error}"])
    card.toolchain = "clang"  # the very code objects that the interpreter runs
    found: list[str] = []
    other = open_device(f"{ISA}:{card.arch.name}")
    assert isinstance(other, GpuDevice)
    other.multiprocessors = card.multiprocessors  # what work is split over: other splits are other sums
    job.say("the trivial kernel")
    wrong = [] if np.array_equal(early.run_trivial(card)[0], early.run_trivial(other)[0]) else [_bits("its result")]
    facts: dict[str, Any] = {"families": {}}
    if job.passed(runfolder.MATRIX):
        wrong += _matrix(job, card, other, found, facts)
    for family in job.asked.families:
        if why := job.left_out(family):
            found.append(why)
            continue
        for variant in steps.variants(family, card.arch.name, few=True):
            wrong += _family(job, variant, (card, other), found, facts)
    equal = sum(one["equal"] for one in facts["families"].values())
    found.insert(0, f"the same code objects on both: {equal} of {len(facts['families'])} cases have the same bits")
    return Outcome(FAILED if wrong else PASSED, [*wrong, *found], facts)


def _bits(what: str) -> str:
    return f"{what}: other bits than the interpreter's, and must have the same"


def _matrix(job: Job, card: GpuDevice, other: GpuDevice, found: list[str], facts: dict[str, Any]) -> list[str]:
    """Maps and products bit for bit; what no manual says is told where the interpreter takes it otherwise."""
    job.say("the matrix probe")
    read = []
    for on in (card, other):
        with checks.recorded(on) as seen:
            probe(on)
        read.append(seen)
    told = arithmetic(card), arithmetic(other)
    facts["arithmetic"] = {"card": told[0], "interpreter": told[1]}
    found += [f"{asked}: the card {told[0][asked]}, the interpreter {told[1][asked]}" for asked in told[0]
              if told[0][asked] != told[1][asked]]  # fmt: skip
    return [] if _equal(*read) else [_bits("the matrix probe")]


def _family(
    job: Job, variant: Variant, devices: tuple[GpuDevice, GpuDevice], found: list[str], facts: dict[str, Any]
) -> list[str]:
    """A case of a variant on both: what is wrong; otherwise how far they are apart is told."""
    (case,) = itertools.islice(oracle_of(variant).glance(variant), 1)
    what, exact = named(variant.name, case), variant.family.oracle == QUANTIZE
    read: list[Arrays] = []
    wrong = []
    try:
        for on in devices:
            job.begins(f"{what} on {on.name}", variant)
            with checks.recorded(on) as seen:
                result = check(variant, case, on)
            read.append(seen)
            wrong += [] if result.ok else [f"on {on.name}: {result.describe()}"]
    except ToolchainError as error:
        return [f"{what} cannot be built: {error}"]
    except DeviceError as error:
        raise DeviceError(f"{what}: {error}") from error
    equal, apart = _equal(*read), _apart(*read)
    facts["families"][variant.entry] = {"case": case.describe(), "equal": equal, "apart": apart, "exact": exact}
    if exact and not equal:
        wrong.append(_bits(what))
    elif not equal:
        found.append(f"{what}: {apart:.1e} apart, of the largest number")
    return wrong


def _equal(one: Arrays, other: Arrays) -> bool:
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _apart(one: Arrays, other: Arrays) -> float:
    """The largest difference of two numbers, in units of the largest number of its array."""
    worst = 0.0
    for a, b in zip(one, other, strict=False):
        if a.dtype.kind != "f" or a.shape != b.shape:
            continue
        both = np.isfinite(a) & np.isfinite(b)
        x, y = (np.where(both, z, 0).astype(np.float64) for z in (a, b))
        worst = max(worst, float(np.abs(x - y).max(initial=0) / max(np.abs(x).max(initial=0), 1e-30)))
    return worst
