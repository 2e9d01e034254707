"""The HIP device without a card: real hip-python, HipDriver and GpuDevice over a stub of ROCm's libraries.

hip-python looks for ROCm once a process, so everything runs in child processes; the tests are in hip_stub/on_*.py.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from hip_lab import SOURCES, environment, install

ARCHS = "gfx1100:sramecc-:xnack-,gfx1201,gfx906,gfx1101"
"""Of the stub's devices. Two that can be used, one that no kernel is built for, one that its hiprtc does not know."""


@pytest.fixture(scope="module")
def rocm(_own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ROCm folder, one for all workers of a run."""
    shared = Path(os.environ["HIPFIRE_CACHE_DIR"]).parent
    root = shared / "hip-stub"
    with (shared / "hip-stub.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            install(root, ("gfx1100", "gfx1201"))
    return root


def child(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HIP_STUB"))}
    path = os.pathsep.join(filter(None, (str(SOURCES.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments], env={**clean, "PYTHONPATH": path, **environ}, capture_output=True, text=True
    )


@pytest.mark.parametrize("group", ["parity", "calls", "compare", "dtypes", "faults", "forks", "graph", "qualify"])
def test_on_the_stub(group: str, rocm: Path) -> None:
    file = SOURCES / f"on_{group}.py"
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={SOURCES}", str(file)]
    done = child(arguments, **environment(rocm, ARCHS), HIP_STUB_UNKNOWN_ARCH="gfx1101")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


ASK = """
import hipfire_kernels as hk
try:
    hk.device("hip:0")
except hk.DeviceError as error:
    print(error)
print([name for name in hk.devices() if "hip" in name])
"""


def reason(prelude: str = "", **environ: str) -> str:
    """Why hip:0 does not open; that nothing else of HIP is listed, and nothing raised."""
    done = child(["-c", prelude + ASK], **environ)
    assert done.returncode == 0, done.stderr
    said, listed = done.stdout.splitlines()
    assert listed == "[]"
    return said


def test_rocm_without_a_card(rocm: Path) -> None:
    said = reason(**environment(rocm, ""))
    assert said.startswith("hipGetDeviceCount failed: hipErrorNoDevice (100): ROCm's runtime is here, but no AMD GPU")
    assert "/dev/kfd" in said


def test_no_rocm(tmp_path: Path) -> None:
    if find_library("amdhip64") or Path("/opt/rocm").exists():
        pytest.skip("this machine has a ROCm that is found without being pointed at")
    said = reason(ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH="")
    assert said.startswith("hipGetDeviceCount cannot be called: failed to dlopen")
    assert "Required: ROCm's runtime, libamdhip64; install it, or point ROCM_PATH" in said


def test_a_runtime_that_lacks_a_function(rocm: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so").symlink_to(rocm / "lib" / "libhiprtc.so")
    said = reason(ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path / "lib"))
    assert said.startswith("hipGetDeviceCount cannot be called: failed to dlsym")


def test_no_hip_python() -> None:
    said = reason("import sys; sys.modules['hip'] = None")
    assert said.startswith("hip-python is not importable")
    assert said.endswith("required for hip devices: pip install hip-python")
