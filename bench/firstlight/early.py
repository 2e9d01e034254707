"""The first steps: what machine this is, whether the card takes memory and a kernel, what its compiler makes, what its
matrix unit does."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from pathlib import Path
from typing import Any

import numpy as np

from hipfire_kernels import __version__
from hipfire_kernels.archs import Arch
from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance, Variant
from hipfire_kernels.bench.firstlight import steps
from hipfire_kernels.bench.firstlight.steps import Job, Outcome
from hipfire_kernels.building.builder import Artifact, build
from hipfire_kernels.building.resources import IN_MEMORY, LABELS
from hipfire_kernels.building.toolchains.registry import toolchains
from hipfire_kernels.checking.matrix_arithmetic import arithmetic
from hipfire_kernels.checking.matrix_probe import PROBE, probe
from hipfire_kernels.dispatch.runfolder import ABSENT, CARD, FAILED, INTERPRETED, PASSED, STANDIN
from hipfire_kernels.errors import DeviceError, HipfireError
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices import ISA
from hipfire_kernels.running.devices.gpu import GpuDevice

TRIVIAL = KernelFamily(
    name="firstlight_trivial",
    doc="a block of 32 elements",
    params={},
    entry=lambda v: "firstlight_trivial",
    args=lambda v: (Tensor("x", "i32", ("n",)), Tensor("y", "i32", ("n",), writes=True), Scalar("n", "i32")),
    grid=lambda v, s: (s.n // 32, 1, 1),
    tolerance=Tolerance(0),
    body="{{ signature }} {\n    const int i = block_x() * 32 + thread();\n    y[i] = 3 * x[i] + i;\n}\n",
)
"""Nothing that can be wrong but the launch itself: every element by a thread of its own, by whole numbers."""


# ---- the machine ----------------------------------------------------------------------------------------------------


def machine(job: Job) -> Outcome:
    """What there is: library, system, driver, card, clocks."""
    facts: dict[str, Any] = {
        "library": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "clocks": _clocks(),
        "driver": _drivers(),
    }
    job.say("opening the device")
    try:
        on = job.device
    except DeviceError as error:
        return Outcome(FAILED, [f"{job.asked.device} does not open: {error}"], facts)
    said = on.describe()
    kind = INTERPRETED if on.driver.vendor == ISA else STANDIN if _stands_in() else CARD
    facts["device"] = {**said, "arch": on.arch.name, "reported_arch": on.reported_arch, "kind": kind}
    found = [
        f"{said['name']}, {on.arch.name}, {on.multiprocessors} multiprocessors, {on.memory_bytes / 2**30:.1f} GiB; "
        f"runtime {said.get('driver_api') or 'none'}"
    ]
    if kind == CARD:
        found += [f"{name}: {text}" for name, text in {**facts["driver"], **facts["clocks"]}.items()]
    else:
        what = "an interpreter of its machine code" if kind == INTERPRETED else "a stand-in for the driver"
        found.append(f"this is no card: it is {what}")
    return Outcome(PASSED, found, facts)


def _stands_in() -> bool:
    """Whether the driver's library that this process has loaded is one of the tests of this library."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for name in loaded:
        if Path(name).name.startswith(("libamdhip64", "libcuda.")):
            with contextlib.suppress(OSError):
                if hasattr(ctypes.CDLL(name), "standin_complaints"):
                    return True
    return False


def _drivers() -> dict[str, str]:
    """Versions that the system tells without anybody asking a card."""
    places = {
        "amdgpu module": "/sys/module/amdgpu/version",
        "amdgpu source": "/sys/module/amdgpu/srcversion",
        "ROCm": "/opt/rocm/.info/version",
        "NVIDIA module": "/sys/module/nvidia/version",
    }
    return {name: text for name, place in places.items() if (text := _text(Path(place)))}


def _clocks() -> dict[str, str]:
    """What the system says of clocks, power and links, of every card: which is whose tells the bus address."""
    found = {}
    for card in sorted(Path("/sys/class/drm").glob("card[0-9]*/device")):
        if not (card / "pp_dpm_sclk").exists():
            continue
        name = f"{card.parent.name} ({card.resolve().name})"
        for file in ("pp_dpm_sclk", "pp_dpm_mclk", "power_dpm_force_performance_level", "current_link_speed",
                     "current_link_width", "vbios_version"):  # fmt: skip
            if text := _text(card / file):
                found[f"{name} {file}"] = ", ".join(line.strip() for line in text.splitlines())
        for cap in card.glob("hwmon/hwmon*/power1_cap"):
            if (text := _text(cap)).isdecimal():
                found[f"{name} power cap"] = f"{int(text) / 1e6:.0f} W"
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


# ---- memory and a kernel --------------------------------------------------------------------------------------------


def memory(job: Job) -> Outcome:
    """Arrays of many sizes, there and back, several at once; each must come back as it went."""
    on, rng, found = job.device, np.random.default_rng(1), []
    sizes = [1, 2, 3, 31, 255, 256, 4095, 4097, 65_537, 1 << 20, (16 << 20) + 5]
    sent = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    held = []
    for one in sent:
        job.say(f"{one.size} bytes")
        held.append(on.to_device(one))
    for one, there in zip(sent, held, strict=True):
        wrong = np.flatnonzero(on.to_host(there) != one)
        if len(wrong):
            found.append(f"of {one.size} bytes {len(wrong)} came back as others, the first at {wrong[0]}")
    pointers = [array.pointer for array in held]
    if any(pointer % 256 for pointer in pointers):
        found.append(f"an allocation is not aligned to 256 bytes: {pointers}")
    first = held[4]
    on.write(first, sent[4][::-1].copy())
    if not np.array_equal(on.to_host(first), sent[4][::-1]):
        found.append("an array that is written anew does not hold what was written")
    job.say("a stream and an event")
    stream, event = on.stream(), on.event()
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    said = f"{len(sizes)} arrays of 1 byte to {sizes[-1] >> 20} MiB, there and back; a stream, an event"
    return Outcome(FAILED if found else PASSED, found or [said])


def run_trivial(on: GpuDevice) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the trivial kernel gives, and what it must give."""
    x = np.random.default_rng(2).integers(-(2**20), 2**20, 32 * 1000).astype(np.int32)
    y = on.to_device(np.full(x.shape, -1, np.int32))
    launch(TRIVIAL.variant(), on, x=on.to_device(x), y=y)
    return on.to_host(y), (3 * x + np.arange(len(x), dtype=np.int32)).astype(np.int32)


def kernel(job: Job) -> Outcome:
    """The trivial kernel: it builds, loads, runs, and each of its elements is right."""
    job.say("building")
    made = build(TRIVIAL.variant(), job.device.arch.name, job.device.toolchain)
    facts = {"compiler": made.compiler, "toolchain": made.toolchain}
    job.say("running")
    got, want = run_trivial(job.device)
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        at = int(wrong[0])
        said = f"{len(wrong)} of {len(want)} elements are wrong, the first is {got[at]} instead of {want[at]} at {at}"
        return Outcome(FAILED, [said], facts)
    return Outcome(PASSED, [f"{len(want)} elements, all right; built by {made.toolchain}: {made.compiler}"], facts)


def alive(job: Job) -> Outcome:
    """Whether the card still takes memory and a kernel."""
    got, want = run_trivial(job.device)
    return Outcome(PASSED if np.array_equal(got, want) else FAILED, [])


# ---- compilers ------------------------------------------------------------------------------------------------------


def compilers(job: Job) -> Outcome:
    """What each compiler for the arch makes of one kernel of every family: the same resources, or which are not."""
    target = job.device.arch
    named = [one for one in toolchains() if one.targets(target)]
    missing = {one.name: why for one in named if (why := one.available(target)) is not None}
    there = [one.name for one in named if one.name not in missing]
    found = [f"{name} is not here, and is not compared: {why}" for name, why in missing.items()]
    if len(there) < 2:
        return Outcome(ABSENT, found or [f"there is one compiler for {target.name} alone: {', '.join(there)}"])
    faults, facts = [], {}
    chosen = [TRIVIAL.variant(), PROBE.variant()]
    chosen += [v for name in job.asked.families for v in steps.variants(name, target.name, few=True)]
    for variant in chosen:
        made: dict[str, Artifact] = {}
        for name in there:
            job.say(f"{variant.entry} by {name}")
            try:
                made[name] = build(variant, target.name, name)
            except HipfireError as error:
                faults.append(f"{name} does not build {variant.entry}: {' '.join(str(error).split())}"[:300])
        facts[variant.entry] = {name: one.resources.as_dict() for name, one in made.items()}
        faults += [f"{name}: {text}" for name, one in made.items() for text in _spilled(variant, one)]
        found += _apart(variant, made)
    both = sum(len(made) == len(there) for made in facts.values())
    same = f"{', '.join(there)}: the same registers and LDS for {both} kernels"
    return Outcome(FAILED if faults else PASSED, faults + (found or [same]), {"resources": facts})


def _spilled(variant: Variant, made: Artifact) -> list[str]:
    taken = made.resources.as_dict()
    return [f"{variant.entry} has {LABELS[name]} {taken[name]}" for name in IN_MEMORY if taken[name]]


def _apart(variant: Variant, made: dict[str, Artifact]) -> list[str]:
    """Where two compilers' kernels take something else; how long the code is does not count."""
    taken = {name: one.resources.as_dict() for name, one in made.items()}
    names = [field for field in LABELS if field != "code_bytes"]
    differing = [f for f in names if len({resources[f] for resources in taken.values()}) > 1]
    said = "; ".join(f"{LABELS[f]} " + ", ".join(f"{n} {r[f]}" for n, r in taken.items()) for f in differing)
    return [f"{variant.entry}: {said}"] if differing else []


# ---- the matrix unit ------------------------------------------------------------------------------------------------


MOST_SAID = 6
"""Sentences on what is wrong with a matrix unit; the figures have all."""


def has_matrix(arch: Arch) -> bool:
    """Whether kernels with the matrix vocabulary can be built for an arch."""
    return PROBE.variant().fits(arch.name)


def matrix(job: Job) -> Outcome:
    """The lane maps of the templates against the unit; then what it does with subnormals and how it rounds."""
    if not has_matrix(job.device.arch):
        return Outcome(ABSENT, [f"no kernel with matrix operations is built for {job.device.arch.name}"])
    job.say("lane maps")
    wrong = probe(job.device)
    job.say("subnormals and rounding")
    told = arithmetic(job.device)
    found = wrong[:MOST_SAID] + ([f"and {len(wrong) - MOST_SAID} more"] if len(wrong) > MOST_SAID else [])
    found = found or ["lane maps, products, reductions, conversions and loads are as the templates say"]
    found += [f"{asked}: {answer}" for asked, answer in told.items()]
    return Outcome(FAILED if wrong else PASSED, found, {"wrong": wrong, "arithmetic": told})
