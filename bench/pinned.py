"""What an A/B run is bound to: code, checkpoints, environment, device, clocks as found; and whether it is traced."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hipfire_kernels
from hipfire_kernels.dispatch import evidence, tuning
from hipfire_kernels.dispatch.measure import identity
from hipfire_kernels.dispatch.record import Record, dump
from hipfire_kernels.errors import InputError
from hipfire_kernels.running.devices.protocol import Device

SHOWN = ("HIPFIRE_", "CUDA_", "HIP_", "ROCR_", "HSA_", "GPU_", "OMP_", "OPENBLAS_", "MKL_")
"""Prefixes of the variables that a document shows; of all others it holds a digest alone."""

TRACERS = (
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "CUDA_LAUNCH_BLOCKING",
    "HIP_LAUNCH_BLOCKING",
    "AMD_LOG_LEVEL",
    "AMD_SERIALIZE_KERNEL",
    "HSA_TOOLS_LIB",
    "ROCP_TOOL_LIB",
    "ROCP_TOOL_LIBRARIES",
    "COVERAGE_PROCESS_START",
    "PYTHONTRACEMALLOC",
)
"""Variables with which profilers, sanitizers and serialising debug modes enter a process."""

_RECORDS = ("dispatch/evidence/", "dispatch/tuning/")


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


PACKAGE = Path(str(hipfire_kernels.__file__)).parent


def code_digest(package: Path = PACKAGE) -> str:
    """Digest of the package: every module, template, and shipped record of evidence and tuning, by name and content."""
    found = hashlib.sha256()
    for name, data in sources(package):
        found.update(f"{name}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


def sources(folder: Path, under: str = "") -> Iterator[tuple[str, bytes]]:
    """Name and content of what decides how the package computes, of a folder and those below it, in a fixed order."""
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = f"{under}{entry.name}"
        if entry.is_dir():
            yield from sources(entry, f"{name}/")
        elif name.endswith((".py", ".j2", ".h", ".cpp")) or name.startswith(_RECORDS):
            yield name, entry.read_bytes()


def records(but: Iterable[str]) -> dict[str, str] | None:
    """Digests of the evidence and the tuning that decide here; None where the folder they come from is what differs.

    Args:
        but: variables that differ between the arms.
    """
    if "HIPFIRE_EVIDENCE_DIR" in set(but):
        return None
    found: dict[str, Mapping[Any, Record]] = {"evidence": evidence.current(), "tuning": tuning.current()}
    return {name: sha256(dump([held[key] for key in sorted(held)]).encode()) for name, held in found.items()}


def checkpoint_digest(path: Path) -> dict[str, Any]:
    """Name, bytes and SHA-256 of a checkpoint: of its file, or of all files of its folder by name and content.

    Raises:
        InputError: it cannot be read.
    """
    found, size = hashlib.sha256(), 0
    try:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while part := opened.read(1 << 22):
                    found.update(part)
                    size += len(part)
    except OSError as error:
        raise InputError(f"checkpoint {path} cannot be read ({error.strerror})") from error
    return {"name": path.name, "bytes": size, "sha256": found.hexdigest()}


def environment(environ: Mapping[str, str], but: Iterable[str] = ()) -> dict[str, Any]:
    """Digest of all variables but some, and those in clear that libraries of this kind read; of a path, its digest."""
    kept = {name: text for name, text in sorted(environ.items()) if name not in set(but)}
    shown = {name: text for name, text in kept.items() if name.startswith(SHOWN)}
    return {
        "sha256": sha256("".join(f"{name}={text}\0" for name, text in kept.items()).encode()),
        "shown": {n: f"sha256 {sha256(t.encode())[:12]}" if os.sep in t else t for n, t in shown.items()},
    }


def tracer() -> str | None:
    """What traces, profiles or serialises this process, or None. Its times are no numbers then."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a Python trace or profile function is set"
    found = [name for name in TRACERS if os.environ.get(name, "0") not in ("", "0")]
    if found:
        return f"{found[0]} is set"
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    traced = [line for line in status.splitlines() if line.startswith("TracerPid:") and line.split()[1] != "0"]
    return f"a debugger is attached ({traced[0]})" if traced else None


def device_facts(device: Device) -> dict[str, Any]:
    """Names of device, driver and compiler, the arch, and the machine."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    return {"name": device.name, "arch": device.arch.name, **identity(device), **machine}


_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"


def clocks(device_name: str) -> dict[str, str]:
    """The clocks as they are now, by whatever the machine has to tell them; empty where nothing tells."""
    vendor, _, index = device_name.partition(":")
    if vendor == "cuda":
        return _nvidia_clocks(index)
    if vendor == "hip":
        return _amd_clocks(Path("/sys/class/drm"))
    return _host_clocks()


def _nvidia_clocks(index: str) -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    argv = [tool, f"--id={index}", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {}
    fields = done.stdout.strip().split(", ")
    names = _QUERY.split(",")
    return dict(zip(names, fields, strict=True)) if done.returncode == 0 and len(fields) == len(names) else {}


def _amd_clocks(root: Path) -> dict[str, str]:
    """The state that amdgpu marks with a star, of each card: `1: 2304Mhz *`."""
    found = {}
    for file in sorted(root.glob("card*/device/pp_dpm_[sm]clk")):
        current = [line.strip(" *") for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("*")]
        if current:
            found[f"{file.parent.parent.name} {file.name}"] = current[0]
    return found


def _host_clocks() -> dict[str, str]:
    found = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        rates = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
        if rates:
            found["cpu MHz"] = f"{min(rates):.0f} .. {max(rates):.0f}"
        governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
        if governor.exists():
            found["governor"] = governor.read_text(encoding="utf-8").strip()
        found["load"] = f"{os.getloadavg()[0]:.2f}"
    except OSError:
        pass
    return found
