"""C++ compiler for the host arch: the kernel as a shared object, for this machine's CPU."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from hipfire_kernels.archs import Arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.storage import ZIG, cache_root, folder_bytes, make_private, reserve
from hipfire_kernels.building.toolchains import Candidate, Compiled, Toolchain
from hipfire_kernels.building.toolchains._llvm import MEMORY, OLDEST, look, too_old, version_line, zig_facts
from hipfire_kernels.building.toolchains._probe import Facts, ProbeFailed, recall
from hipfire_kernels.building.toolchains._process import refusal, run

_OPTIONS = (
    "-O3",
    "-gline-tables-only",  # a fault names its line; more would be five times the code
    # x86 compilers take it by one name, the others by the other.
    "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",
    "-std=c++20",
    "-ffp-contract=off",  # kernels that do the same arithmetic must give the same bits, here and on the GPU
    "-fno-math-errno",
    "-fstack-clash-protection",  # an array larger than a guard page must not step over the one at a stack's end
    "-fno-optimize-sibling-calls",  # a fault in a function that is called last is one of the caller's line
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-nostdlib++",  # no C++ library is used; asked for one, the wheel's compiler builds it for 40 s
    "-Wall",
    "-Wextra",
)

_ZIG_ROOM = 64 << 20
"""Bytes that the wheel's compiler needs for its runtime. It takes 47 MB."""

_log = logging.getLogger(__name__)


class HostToolchain(Toolchain):
    """clang++ from the system, or from the `ziglang` wheel."""

    name = "host"

    def __init__(self) -> None:
        self._memo: MEMORY = {}

    def targets(self, arch: Arch) -> bool:
        """The host alone."""
        return arch.dialect == "host"

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """System clang++ by name, then the wheel's; see `_llvm.look` for the order."""
        seen = look("clang++", arch.name, self._memo, _system, _wheel)
        if seen[-1].reason is not None and shutil.which("g++"):
            return (
                *seen,
                Candidate("g++", "not supported: kernels use ext_vector_type and _Float16, which are clang's"),
            )
        return seen

    def options(self, arch: Arch) -> tuple[str, ...]:
        """Always the same; what `native` stands for is in `identity`."""
        return _OPTIONS

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile and link in one command."""
        chosen = self.chosen(arch)
        with scratch.folder() as folder:
            (folder / "kernel.cpp").write_text(source)
            command = (*chosen.command, *_OPTIONS, *extra, "kernel.cpp", "-o", "kernel.so")
            env = _zig_environment(folder) if chosen.label == "ziglang" else None
            finished = run(command, cwd=folder, env=env)
            if finished.failure is not None:
                raise refusal(chosen.label, arch.name, finished, source)
            return Compiled((folder / "kernel.so").read_bytes(), finished.err)


def _system(path: str) -> Candidate:
    """Examine a clang++ on the PATH. It has to link something: some have no linker or libc."""
    try:
        facts = recall(("clang++", path), [path], lambda: _system_facts(path))
    except ProbeFailed as failure:
        return Candidate(path, str(failure))
    identity = f"{facts['clang']}, {machine()}"
    return Candidate(path, too_old(facts["clang"], OLDEST), identity=identity, command=(path,))


def _system_facts(path: str) -> Facts:
    version = version_line((path,))
    if too_old(version, OLDEST) is None:
        with scratch.folder() as folder:
            (folder / "probe.cpp").write_text('extern "C" int probe() { return 0; }\n')
            finished = run([path, *_OPTIONS, "probe.cpp", "-o", "probe.so"], cwd=folder)
        if finished.failure is not None:
            said = (finished.err.strip().splitlines() or [finished.failure])[0]
            raise ProbeFailed(f"{version} cannot link a shared object: {said}")
    return {"clang": version}


def _wheel(zig: str) -> Candidate:
    """Examine the `ziglang` wheel. It brings its own linker and libc stubs, so no trial is needed."""
    try:
        facts = zig_facts(zig)
    except ProbeFailed as failure:
        return Candidate("ziglang", str(failure))
    identity = f"ziglang {facts['zig']}, {facts['clang']}, {machine()}"
    return Candidate("ziglang", too_old(facts["clang"], OLDEST), identity=identity, command=(zig, "c++"))


@functools.cache
def machine() -> str:
    """What `native` means here, and the C library linked against.

    An object from a home folder shared between machines must not meet a CPU that lacks its instructions.
    """
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "other libc"
    return f"{platform.machine()} cpu {hashlib.sha256(_cpu().encode()).hexdigest()[:16]}, {libc}"


def _cpu() -> str:
    """Model and feature flags of the first core; the machine's name where they cannot be read."""
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "CPU implementer",
        "CPU part",
        "Features",
    )
    try:
        with open("/proc/cpuinfo") as file:  # one core alone: the file of a large server takes long to make
            core = file.read(8192).split("\n\n")[0]
    except OSError:
        return platform.node()
    fields = (line.partition(":") for line in core.splitlines())
    return "\n".join(f"{name.strip()}={value.strip()}" for name, _, value in fields if name.strip() in wanted)


def _zig_environment(folder: Path) -> Mapping[str, str]:
    """The wheel's compiler keeps its runtime in a cache of its own: 4 s to build, then 0.05 s a kernel."""
    return {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(_zig_cache()),
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
    }


def _zig_cache() -> Path:
    """A folder that can be written to and has room: with another, the compiler waits for ever, or names what it was
    just building of its runtime."""
    root = cache_root()
    try:
        make_private(root / ZIG, root)
        reserve(root / ZIG, max(scratch.ROOM, _ZIG_ROOM - folder_bytes(root / ZIG)))
    except OSError as error:
        return _temporary_zig_cache(root, error.strerror or str(error))
    return root / ZIG


@functools.cache
def _temporary_zig_cache(root: Path, why: str) -> Path:
    """Another one, for as long as this process lives."""
    made = contextlib.ExitStack()
    path = made.enter_context(scratch.folder(_ZIG_ROOM, "ziglang's runtime"))
    atexit.register(made.close)
    _log.warning(
        "ziglang builds its runtime anew in %s, for %s cannot take it (%s); make room there or set HIPFIRE_CACHE_DIR",
        path, root, why,
    )  # fmt: skip
    return path
