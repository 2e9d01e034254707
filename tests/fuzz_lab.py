"""`hfk` with a fault planted in it and in every process it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import MUTANTS, TILE, TILE_BATCHED, Mutant, plant

from hipfire_kernels import families
from hipfire_kernels.authoring.registry import REGISTRY
from hipfire_kernels.testing import case

SCORED = "    block_sync();\n\n    float m[1]"


def _before_the_softmax(name: str, statement: str) -> Mutant:
    return Mutant(name, TILE_BATCHED, TILE, f"{TILE_BATCHED}.hip.j2", SCORED, f"    {statement}\n{SCORED}")


BROKEN = [
    _before_the_softmax("hangs", 'while (bound > 3) asm volatile("");'),
    _before_the_softmax("crashes", "if (bound > 3) __builtin_abort();"),
    _before_the_softmax("deadlocks", "if (lane() < 7) block_sync();"),
]
"""Faults that no comparison sees: the process does not come back, or not whole."""

FAULTS = {m.name: m for m in [*MUTANTS, *BROKEN]}
PLANTED = "HK_PLANTED_FAULT"


def plant_everywhere(mutant: Mutant) -> None:
    """Put a fault in place for whoever asks for the family by name, too."""
    family = plant(mutant).family
    REGISTRY._known[family.name] = (family, "a planted fault")
    case._library().update({variant.entry: variant for variant in family.variants()})


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


def hfk(folder: Path, fault: str | None, *args: str | Path) -> Run:
    """Run a command in a folder. A `sitecustomize` there plants the fault in whatever Python starts from it."""
    (folder / "sitecustomize.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"name = os.environ.get({PLANTED!r})\n"
        "if name:\n    import fuzz_lab\n    fuzz_lab.plant_everywhere(fuzz_lab.FAULTS[name])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(folder), PLANTED: fault or ""}
    command = [sys.executable, "-m", "hipfire_kernels.cli", *map(str, args)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    return Run(done.returncode, done.stdout, done.stderr)


def variant_name(fault: str) -> str:
    """The entry name of the variant that a fault is in."""
    mutant = FAULTS[fault]
    return families()[mutant.family].variant(**mutant.params).entry
