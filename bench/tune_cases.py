"""`hfk tune` for any family with a reference and a `space`: which values of its free choices are the fastest.

Nothing decides for such a family but its declaration, so nothing is stored: the winner is put first in `space`, and
named by whoever launches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hipfire_kernels.authoring.family import KernelFamily, Site, Variant
from hipfire_kernels.bench import pairs
from hipfire_kernels.bench.tune import ROUNDS, in_words
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking import declared, oracle
from hipfire_kernels.errors import InputError
from hipfire_kernels.inspecting import compare
from hipfire_kernels.kernels import families
from hipfire_kernels.running.devices.protocol import Device


@dataclass(frozen=True)
class Rival:
    """A candidate beside the default: median microseconds of both, and what their pairs say."""

    variant: Variant
    default_us: float
    us: float
    judgement: pairs.Judgement


@dataclass
class Contest:
    """The candidates of one variant on one case.

    Attributes:
        default: the variant with the first of each value.
        case: what is timed.
        rivals: those that are right, the fastest first.
        faults: what is wrong with the others.
    """

    default: Variant
    case: declared.DeclaredCase
    rivals: list[Rival] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def winner(self) -> Rival | None:
        """The fastest that is faster than the default beyond doubt; None where the default stays."""
        return next((rival for rival in self.rivals if rival.judgement.verdict == "on is faster"), None)


def tunable() -> dict[str, KernelFamily]:
    """Families with a reference and a choice that is free, by name."""
    found = {name: family for name, family in families().items() if family.reference is not None}
    return {name: family for name, family in found.items() if _free(next(family.variants()), Site(1, 1, 1))}


def _free(variant: Variant, site: Site) -> dict[str, tuple[int, ...]]:
    """The choices that are parameters."""
    space = variant.family.space(variant, site)
    return {name: tuple(values) for name, values in space.items() if name in variant.family.params}


def contests(family: KernelFamily, device: Device, extents: Mapping[str, int]) -> list[Contest]:
    """What there is to time of a family: each default with a case.

    Args:
        extents: of symbols that are not to have their largest value.

    Raises:
        InputError: an extent is not what the declaration allows.
    """
    site = Site(device.multiprocessors, 1, 1)
    defaults = [v for v in family.variants() if all(getattr(v, n) == c[0] for n, c in _free(v, site).items())]
    return [Contest(variant, declared.sized(variant, extents)) for variant in defaults]


def candidates(default: Variant, device: Device) -> Iterator[Variant]:
    """Every legal combination of the values, the default first."""
    free = _free(default, Site(device.multiprocessors, 1, 1))
    for values in itertools.product(*free.values()):
        given = {**dict(default.params), **dict(zip(free, values, strict=True))}
        try:
            found = default.family.variant(**given)
        except InputError:  # a combination that `where` rules out
            continue
        if found.fits(device.arch.name):
            yield found


def run(contest: Contest, device: Device, step: Callable[[str], None]) -> None:
    """Hold every candidate against the reference, and time those that are right in one interleaved run.

    Raises:
        InputError: the default is wrong, so that there is nothing to compare with.
    """
    sides: dict[str, compare.Build] = {}
    for variant in candidates(contest.default, device):
        fault = _fault(variant, device)
        if not fault:
            sides[variant.entry] = compare.Build(variant, build(variant, device.arch.name, device.toolchain))
        elif variant == contest.default:
            raise InputError(f"the default {variant.name} is wrong ({fault}): nothing can be tuned; hfk parity")
        else:
            contest.faults.append(f"{variant.entry}: {fault}")
    taken = compare.times(sides, contest.case, device, ROUNDS)
    base = taken.pop(contest.default.entry)
    for entry, times in taken.items():
        ratios = [a / b for a, b in zip(base.samples, times.samples, strict=True)]
        contest.rivals.append(Rival(sides[entry].variant, base.median, times.median, pairs.judge(ratios)))
    contest.rivals.sort(key=lambda rival: rival.judgement.ratio, reverse=True)
    step(contest.default.name)


def _fault(variant: Variant, device: Device) -> str:
    """What is wrong with a variant; empty when there is nothing."""

    def first() -> str:
        checked = (oracle.check(variant, case, device) for case in oracle.oracle_of(variant).grid(variant, quick=True))
        return next((found.describe() for found in checked if not found.ok), "")

    return in_words(device, first)
