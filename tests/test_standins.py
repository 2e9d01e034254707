"""GPU devices without a card: the real bindings, their drivers and GpuDevice over stand-ins for the vendors' libraries.

Bindings look for a vendor's libraries once a process, so everything runs in child processes; the tests are in
standins/on_*.py, most of them for both vendors.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

import pytest
from standin_lab import CUDA, FACES, HIP, SOURCES, Face, environment, install, missing

BOTH = ("parity", "calls", "dtypes", "foreign", "order", "faults", "forks", "graph")
GROUPS = {
    "hip": (
        "parity",
        "calls",
        "dtypes",
        "foreign",
        "order",
        "faults",
        "forks",
        "graph",
        "loop",
        "hip",
        "compare",
        "qualify",
    ),
    "cuda": ("parity", "calls", "dtypes", "foreign", "order", "faults", "forks", "graph", "cuda", "bench"),
}
"""Of standins/on_*.py, what runs on which stand-in: what only one has, and, once, what knows of no vendor."""


@pytest.fixture(scope="session")
def installed(_own_cache: None) -> Callable[[Face], Path]:
    """A folder of a stand-in, one for all workers of a run."""

    def folder(face: Face) -> Path:
        if why := missing(face):
            pytest.skip(why)
        shared = Path(os.environ["HIPFIRE_CACHE_DIR"]).parent
        root = shared / f"standin-{face.vendor}"
        with (shared / f"standin-{face.vendor}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / "complete").exists():
                install(root, face)
                (root / "complete").touch()
        return root

    return folder


def child(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "STANDIN"))}
    path = os.pathsep.join(filter(None, (str(SOURCES.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments], env={**clean, "PYTHONPATH": path, **environ}, capture_output=True, text=True
    )


@pytest.mark.parametrize(("vendor", "group"), [(vendor, group) for vendor in GROUPS for group in GROUPS[vendor]])
def test_on_the_stand_in(vendor: str, group: str, installed: Callable[[Face], Path]) -> None:
    face = FACES[vendor]
    file = SOURCES / f"on_{group}.py"
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={SOURCES}", str(file)]
    done = child(arguments, **environment(installed(face), face))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_file_runs_somewhere() -> None:
    assert {group for groups in GROUPS.values() for group in groups} == {
        file.stem.removeprefix("on_") for file in SOURCES.glob("on_*.py")
    }


ASK = """
import sys
import hipfire_kernels as hk
vendor = sys.argv[1]
try:
    hk.device(vendor + ":0")
except hk.DeviceError as error:
    print(error)
print([name for name in hk.devices() if vendor in name])
"""


def reason(vendor: str, prelude: str = "", **environ: str) -> str:
    """Why the vendor's first device does not open; that nothing of it is listed, and nothing raised."""
    done = child(["-c", prelude + ASK, vendor], **environ)
    assert done.returncode == 0, done.stderr
    said, listed = done.stdout.strip().rsplit("\n", 1)
    assert listed == "[]"
    return said


def test_rocm_without_a_card(installed: Callable[[Face], Path]) -> None:
    said = reason("hip", **environment(installed(HIP), HIP, ()))
    assert said.startswith("hipGetDeviceCount failed: hipErrorNoDevice (100): ROCm's runtime is here, but no AMD GPU")
    assert "/dev/kfd" in said


def test_cuda_without_a_card(installed: Callable[[Face], Path]) -> None:
    said = reason("cuda", **environment(installed(CUDA), CUDA, ()))
    assert said.startswith("cuInit failed: CUDA_ERROR_NO_DEVICE (100): NVIDIA's driver is here, but no GPU that this")
    assert "CUDA_VISIBLE_DEVICES" in said


def test_no_rocm(tmp_path: Path) -> None:
    if find_library("amdhip64") or Path("/opt/rocm").exists():
        pytest.skip("this machine has a ROCm that is found without being pointed at")
    said = reason("hip", ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH="")
    assert said.startswith("hipGetDeviceCount cannot be called: failed to dlopen")
    assert "Required: ROCm's runtime, libamdhip64; install it, or point ROCM_PATH" in said


def test_no_nvidia_driver() -> None:
    if find_library("cuda"):
        pytest.skip("this machine has an NVIDIA driver")
    if why := missing(CUDA):
        pytest.skip(why)
    said = reason("cuda", LD_LIBRARY_PATH="")
    assert said.startswith("cuInit cannot be called: ")
    assert said.endswith("Required: NVIDIA's driver, libcuda, for CUDA 12 or later")


def test_a_runtime_that_lacks_a_function(installed: Callable[[Face], Path], tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so").symlink_to(installed(HIP) / "lib" / "libhiprtc.so")
    said = reason("hip", ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path / "lib"))
    assert said.startswith("hipGetDeviceCount cannot be called: failed to dlsym")


def test_a_driver_that_lacks_a_function(installed: Callable[[Face], Path], tmp_path: Path) -> None:
    """The bindings look for each when it is called first."""
    environ, required = environment(installed(CUDA), CUDA), "Required: NVIDIA's driver, libcuda, for CUDA 12 or later"
    said = reason("cuda", **environ, STANDIN_LACKS="cuDevicePrimaryCtxRetain")
    assert said.startswith("cuDevicePrimaryCtxRetain cannot be called: ")
    assert said.endswith(required)
    (tmp_path / "libcuda.so.1").symlink_to(installed(CUDA) / "lib" / "libnvrtc.so.13")
    assert reason("cuda", LD_LIBRARY_PATH=str(tmp_path)).startswith("cuInit cannot be called: ")


@pytest.mark.parametrize(
    ("vendor", "module", "start", "end"),
    [
        ("hip", "hip", "hip-python is not importable", "required for hip devices: pip install hip-python"),
        ("cuda", "cuda", "cuda-bindings is not importable", "for cuda devices: install hipfire-kernels[cuda]"),
    ],
)
def test_no_bindings(vendor: str, module: str, start: str, end: str) -> None:
    said = reason(vendor, f"import sys; sys.modules[{module!r}] = None\n")
    assert said.startswith(start)
    assert said.endswith(end)


def test_no_nvrtc(tmp_path: Path) -> None:
    """Neither the library nor the bindings."""
    ask = (
        "from hipfire_kernels.archs import arch\n"
        "from hipfire_kernels.building.toolchains.nvrtc import NvrtcToolchain\n"
        "print(NvrtcToolchain().available(arch('sm_90')))"
    )
    hidden = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda name: None if name == 'cuda' else f(name)\n"
    )
    without = child(["-c", hidden + ask])
    assert without.stdout.strip() == "cuda-bindings: not installed; `pip install hipfire-kernels[cuda]`", without.stderr
    if why := missing(CUDA):
        pytest.skip(why)
    if find_library("nvrtc"):
        pytest.skip("this machine has an nvrtc")
    said = child(["-c", ask], LD_LIBRARY_PATH=str(tmp_path)).stdout.strip()
    if said == "None":
        pytest.skip("this machine has an nvrtc, in NVIDIA's wheel")
    assert said.startswith("libnvrtc: does not load: ")
