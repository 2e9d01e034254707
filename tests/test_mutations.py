"""The parity set must fail for every fault of `mutants`. A suite that stays green under one of them is not done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, survives

from hipfire_kernels import families
from hipfire_kernels.running.devices.protocol import Device

CAUGHT, CRASHED = 1, range(-64, 0)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_the_fault_is_caught(mutant: Mutant, host: Device) -> None:
    program = Path(__file__).with_name("mutants.py")
    done = subprocess.run([sys.executable, program, mutant.name], capture_output=True, text=True, timeout=900)
    assert done.returncode == CAUGHT or done.returncode in CRASHED, done.stdout + done.stderr
    # A fault may have overwritten the heap; any other exception is a fault of the check itself.
    assert "Traceback" not in done.stderr or "MemoryError" in done.stderr, done.stderr


@pytest.mark.parametrize("name", sorted({m.family for m in MUTANTS}))
def test_without_a_fault_the_same_cases_pass(name: str, host: Device) -> None:
    for params in {tuple(m.params.items()) for m in MUTANTS if m.family == name}:
        assert survives(families()[name].variant(**dict(params)))
