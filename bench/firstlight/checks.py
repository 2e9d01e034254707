"""Kernels held against the float64 oracle: with canaries around every array, then on the small and the full grid."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.render import source_digest
from hipfire_kernels.bench.firstlight import steps
from hipfire_kernels.bench.firstlight.steps import Job, Outcome
from hipfire_kernels.checking.oracle import check, oracle_of
from hipfire_kernels.checking.result import named
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import ABSENT, FAILED, PASSED
from hipfire_kernels.errors import DeviceError, ToolchainError
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Launch
from hipfire_kernels.running.preparing import prepare

MOST_SAID = 8
"""Sentences of one kind in a report."""

FEW_CASES = 3
"""Cases of a variant's grid in a run of few."""


# ---- canaries -------------------------------------------------------------------------------------------------------


class Canaries:
    """While it is entered: every array of a device lies between two regions that no kernel may write, and what a kernel
    reads must be the same when it has run. `faults` says what was not so."""

    BESIDE = 4096
    """Bytes on each side."""

    _BYTE = 0xA5

    def __init__(self, device: GpuDevice) -> None:
        self._device, self._empty, self._launch = device, device.empty, device.launch
        self._regions: list[Any] = []
        self.faults: list[str] = []

    def __enter__(self) -> Canaries:
        vars(self._device).update(empty=self.empty, launch=self.launch)
        return self

    def __exit__(self, *ended: object) -> None:
        for name in ("empty", "launch"):
            vars(self._device).pop(name)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """As `Device.empty`, between two regions."""
        kind, size = np.dtype(dtype), math.prod(shape)
        beside = self.BESIDE // kind.itemsize
        whole = self._empty((size + 2 * beside,), kind)
        for start in (0, beside + size):
            region = self._device.section(whole, start, (beside,))
            self._device.write(region, np.full(self.BESIDE, self._BYTE, np.uint8).view(kind))
            self._regions.append(region)
        return self._device.section(whole, beside, shape)

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        """As `Device.launch`, one at a time, what it reads compared before and behind it."""
        for one in launches:
            read = [a for a in one.args.described() if not a.writes and a.nbytes]
            before = [self._bytes(one.args.values[a.slot].value, a.nbytes) for a in read]
            self._launch((one,), stream)
            self._device.synchronize()
            for argument, then in zip(read, before, strict=True):
                if self._bytes(one.args.values[argument.slot].value, argument.nbytes) != then:
                    self.faults.append(f"its input {argument.name} was changed")

    def _bytes(self, pointer: int, nbytes: int) -> bytes:
        host = np.empty(nbytes, np.uint8)
        self._device.synchronize()
        self._device.driver.copy_out(host.ctypes.data, pointer, nbytes)
        return host.tobytes()

    def look(self) -> None:
        """See whether the regions are as they were; then have none."""
        for region in self._regions:
            if not (np.ascontiguousarray(self._device.to_host(region)).view(np.uint8) == self._BYTE).all():
                self.faults.append(f"wrote beside an array of {region.dtype}")
        self._regions = []


def canaries(job: Job) -> Outcome:
    """One case or a few of each family with every array between canaries."""
    faults: list[str] = []
    left: list[str] = []
    ran = 0
    for family in job.asked.families:
        if why := job.left_out(family):
            left.append(why)
            continue
        for variant in steps.variants(family, job.device.arch.name, few=True):
            cases, wrong = _watched(job, variant)
            ran, faults = ran + cases, faults + wrong
    found = faults[:MOST_SAID] or [f"{ran} cases: no kernel has written beside an array, or into what it reads"]
    return Outcome(FAILED if faults else PASSED, found + left)


def _watched(job: Job, variant: Variant) -> tuple[int, list[str]]:
    """A few cases of a variant between canaries: how many, and what was found. Whether results are right is not asked.

    Raises:
        DeviceError: the device may do no work any more.
    """
    on, faults, ran = job.device, [], 0
    job.say(f"building {variant.entry}")
    try:
        prepare(variant, on)
    except ToolchainError as error:
        return 0, [f"{variant.entry} cannot be built: {error}"]
    for case in itertools.islice(oracle_of(variant).glance(variant), FEW_CASES):
        job.begins(named(variant.name, case), variant)
        try:
            with Canaries(on) as held:
                result = check(variant, case, on)
                held.look()
        except DeviceError as error:
            raise DeviceError(f"{named(variant.name, case)}: {error}") from error
        ran += 1
        said = [*held.faults, *([result.fault] if "outside" in result.fault else [])]
        faults += [f"{named(variant.name, case)}: {text}" for text in said]
    return ran, faults


# ---- parity ---------------------------------------------------------------------------------------------------------


def parity(job: Job) -> Outcome:
    """The small or the full grid of a family; variants that an earlier run of it has finished are not run again."""
    small = job.step.name == runfolder.quick(job.step.family)
    on = job.device
    chosen = steps.variants(job.step.family, on.arch.name, few=job.asked.few)
    if not chosen:
        return Outcome(ABSENT, [f"no variant of {job.step.family} is built for {on.arch.name}"])
    done = {note["variant"]: note for note in job.folder.notes(job.step.name) if "variant" in note}
    for variant in chosen:
        if variant.entry not in done:
            done[variant.entry] = _held(job, variant, small)
            job.note(**done[variant.entry])
    held = [done[variant.entry] for variant in chosen]
    failed = [line for one in held for line in one["failed"]]
    cases = sum(one["cases"] for one in held)
    worst = max(held, key=lambda one: one["share"])
    found = [f"{len(failed)} of {counted(cases, 'case')} are wrong", *failed[:MOST_SAID]]
    if not failed:
        ran = f"{counted(len(held), 'variant')}, {counted(cases, 'case')}"
        found = [f"{ran}, all right; the worst is at {worst['share']:.0%} of its limit ({worst['variant']})"]
    return Outcome(FAILED if failed else PASSED, found, {"variants": held})


def _cases(job: Job, variant: Variant, small: bool) -> Iterator[Any]:
    oracle = oracle_of(variant)
    if not job.asked.few:
        return oracle.grid(variant, quick=small)
    return itertools.islice(oracle.glance(variant), 1 if small else FEW_CASES)


def _held(job: Job, variant: Variant, small: bool) -> dict[str, Any]:
    """What the cases of a variant give. One that breaks the device ends the step: the mark says which it was."""
    on = job.device
    job.begins(variant.entry, variant)
    prepare(variant, on)
    cases, share, worst, failed = 0, 0.0, 0.0, []
    for case in _cases(job, variant, small):
        job.say(named(variant.name, case))
        cases += 1
        try:
            result = check(variant, case, on)
        except DeviceError as error:
            if not on.survives:
                raise DeviceError(f"{named(variant.name, case)}: {error}") from error
            failed.append(f"FAILED {named(variant.name, case)}: {error}")
            continue
        if not result.ok:
            failed.append(result.describe())
        worst = max(worst, result.error) if math.isfinite(result.error) else worst
        share = max(share, result.share) if math.isfinite(result.share) else share
    return {
        "variant": variant.entry,
        "digest": source_digest(variant.source(on.arch.name)),
        "cases": cases,
        "worst": worst,
        "share": share,
        "failed": failed,
    }


def counted(n: int, what: str) -> str:
    """So many of something, in words."""
    return f"{n} {what}{'' if n == 1 else 's'}"


@contextlib.contextmanager
def recorded(device: GpuDevice) -> Iterator[list[npt.NDArray[Any]]]:
    """Everything that is read back from a device in the block, in order."""
    seen: list[npt.NDArray[Any]] = []
    plain = device.to_host

    def to_host(array: Any) -> npt.NDArray[Any]:
        found = plain(array)
        seen.append(np.array(found))
        return found

    vars(device)["to_host"] = to_host
    try:
        yield seen
    finally:
        vars(device).pop("to_host")
