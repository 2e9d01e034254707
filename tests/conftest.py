"""Shared fixtures. BLAS runs single-threaded: its spinning threads would fight the ones that run kernel blocks."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import pytest

from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.protocol import Device


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cold artifact cache for the whole run, shared by all workers, and no evidence, instead of the user's."""
    root = tmp_path_factory.getbasetemp()
    shared: Path = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    os.environ["HIPFIRE_CACHE_DIR"] = str(shared / "hipfire-cache")
    os.environ["HIPFIRE_EVIDENCE_DIR"] = str(shared / "no-evidence")


@pytest.fixture(scope="session")
def host(_own_cache: None) -> Device:
    """The host device."""
    return device("host")
