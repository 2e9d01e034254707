"""Faults in what only AMD runs are caught on the interpreter, and waits that are taken out are reported.

A few in the default run; all of them with `pytest -m long`, and as tables by `python tests/isa_mutants.py`.
"""

from __future__ import annotations

import pytest
from budget import some
from isa_lab import ARCHS
from isa_mutants import BODY, DIALECT, MAPS, MATRIX, MMA, MUTANTS, Mutant, caught, found, removed

from hipfire_kernels import families
from hipfire_kernels.running.devices.isa import IsaDevice

TRIED = [(mutant, arch) for mutant in MUTANTS for arch in mutant.archs]


@pytest.mark.parametrize(("mutant", "arch"), some(TRIED, 4))
def test_the_fault_is_caught(mutant: Mutant, arch: str, host: object) -> None:
    assert caught(mutant, arch)


def test_every_template_has_its_faults() -> None:
    assert {mutant.template for mutant in MUTANTS} == {DIALECT, MATRIX, MAPS, BODY}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", sorted({str(mutant.kernel) for mutant in MUTANTS}))
def test_without_a_fault_the_same_cases_pass(name: str, arch: str, host: object) -> None:
    variant = next(mutant.variant for mutant in MUTANTS if str(mutant.kernel) == name)
    assert found(variant, IsaDevice(arch)) == ""


@pytest.mark.parametrize(("arch", "every"), [(arch, 16) for arch in ARCHS])
def test_some_removed_waits_are_reported(arch: str, every: int, host: object) -> None:
    results = removed(families()[MMA[0]].variant(**MMA[1]), arch, every)
    assert sum(one.reported for one in results) >= 0.7 * len(results)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_removed_waits_are_reported(arch: str, host: object) -> None:
    results = removed(families()[MMA[0]].variant(**MMA[1]), arch)
    assert sum(one.reported for one in results) >= 0.9 * len(results)
