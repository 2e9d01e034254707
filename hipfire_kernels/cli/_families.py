"""Families that the command line names, for this process and those it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hipfire_kernels.authoring.registry import REGISTRY, VARIABLE


def use(names: Sequence[str]) -> None:
    """Load them, and have child processes load them too.

    Raises:
        InputError: one cannot be imported, or holds no family.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    named = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
    for name in named:
        REGISTRY.load(name)
    before = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    os.environ[VARIABLE] = ",".join(dict.fromkeys([*before, *named]))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
