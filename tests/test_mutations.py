"""The parity set must fail for every fault of `mutants`. A suite that stays green under one of them is not done."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from budget import some
from mutants import MUTANTS, Mutant, plant, survives

from hipfire_kernels import families
from hipfire_kernels.running.devices.protocol import Device

CAUGHT, CRASHED = 3, range(-64, 0)
LIMIT_S = 900

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["mutants"])
"""A fault may crash its process, so each has one; what they all import is imported once."""


def run(name: str, said: Path) -> None:
    """Plant a fault in this process and look for it."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    planted = next(m for m in MUTANTS if m.name == name)
    raise SystemExit(0 if survives(plant(planted)) else CAUGHT)


@pytest.mark.parametrize("mutant", some(MUTANTS, 40), ids=lambda m: m.name.replace(" ", "-"))
def test_the_fault_is_caught(mutant: Mutant, host: Device, tmp_path: Path) -> None:
    process = PROCESSES.Process(target=run, args=(mutant.name, tmp_path / "said"))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    said = (tmp_path / "said").read_text(errors="replace")
    assert process.exitcode == CAUGHT or process.exitcode in CRASHED, (process.exitcode, said)
    # A fault may have overwritten the heap; any other exception is a fault of the check itself.
    assert "Traceback" not in said or "MemoryError" in said, said


@pytest.mark.parametrize("name", sorted({m.family for m in MUTANTS}))
def test_without_a_fault_the_same_cases_pass(name: str, host: Device) -> None:
    for params in {tuple(m.params.items()) for m in MUTANTS if m.family == name}:
        assert survives(families()[name].variant(**dict(params)))
