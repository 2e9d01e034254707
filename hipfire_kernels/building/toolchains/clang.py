"""Offline compiler for gfx archs, with no GPU, ROCm or headers: a system clang, or the `ziglang` wheel's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from hipfire_kernels.archs import Arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.toolchains import Candidate, Compiled, Toolchain
from hipfire_kernels.building.toolchains._llvm import MEMORY, OLDEST, look, major, too_old, version_line, zig_facts
from hipfire_kernels.building.toolchains._probe import Facts, ProbeFailed, recall
from hipfire_kernels.building.toolchains._process import refusal, run

_OLDEST_FOR = {"gfx12": 19}
"""Where an arch generation needs a newer clang than `_llvm.OLDEST`: the oldest one tried on it."""

_OPTIONS = (
    "--no-default-config",  # a distribution's hardening options are for the CPU
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",  # kernels that do the same arithmetic must give the same bits
    "-mno-cumode",  # a workgroup may use a whole WGP, which the occupancy figure takes for granted
    "-nogpuinc",
    "-nogpulib",
    "-Wall",
    "-Wextra",
)
_LISTED = ("-gline-tables-only", "-fdebug-compilation-dir=.", "-S")  # no text of one build names its folder


class ClangToolchain(Toolchain):
    """clang with the AMDGPU target and an lld of the same major version."""

    name = "clang"

    def __init__(self) -> None:
        self._memo: MEMORY = {}

    def targets(self, arch: Arch) -> bool:
        """gfx archs."""
        return arch.dialect == "amd"

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """System clangs by name, then the wheel's; see `_llvm.look` for the order."""
        oldest = _OLDEST_FOR.get(arch.name[:5], OLDEST)
        return look(
            "clang",
            arch.name,
            self._memo,
            lambda path: _system(path, oldest),
            lambda path: _wheel(path, oldest),
        )

    def options(self, arch: Arch) -> tuple[str, ...]:
        """The same for every gfx arch."""
        return (*_OPTIONS, f"--offload-arch={arch.name}")

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """One command with a system clang; compile, assemble and link with the wheel's. The assembly text is what the
        wheel assembles, and a second command with a system clang."""
        chosen = self.chosen(arch)
        front = _front(self.options(arch), extra)
        if chosen.label == "ziglang":
            steps = _wheel_steps(chosen.command[0], front, arch)
            made, log = _run_steps(chosen.label, arch, steps, source, ("kernel.co", "kernel.s"))
            return Compiled(made[0], log, made[1].decode())
        step = (*chosen.command, *front, "--no-gpu-bundle-output", "kernel.hip", "-o", "kernel.co")
        (code,), log = _run_steps(chosen.label, arch, [step], source, ("kernel.co",))
        return Compiled(code, log, self.assembly(source, arch, extra))

    def assembly(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> str:
        """The compiler's own `-S`, one command with either. Line tables leave the instructions as they are."""
        chosen = self.chosen(arch)
        step = (*_clang(chosen), *_front(self.options(arch), (*extra, *_LISTED)), "kernel.hip", "-o", "kernel.s")
        return _run_steps(chosen.label, arch, [step], source, ("kernel.s",))[0][0].decode()

    def assemble(self, assembly: str, arch: Arch) -> bytes:
        """One command with either."""
        chosen = self.chosen(arch)
        step = (*_clang(chosen), *_assembler(arch), "kernel.s", "-o", "kernel.o")
        return _run_steps(chosen.label, arch, [step], assembly, ("kernel.o",), "kernel.s")[0][0]


def _clang(chosen: Candidate) -> tuple[str, ...]:
    return (chosen.command[0], "clang") if chosen.label == "ziglang" else chosen.command


def _assembler(arch: Arch) -> tuple[str, ...]:
    # The text is the compiler's own, and its warnings about line tables (not all files have a digest) are no author's.
    return ("--target=amdgcn-amd-amdhsa", f"-mcpu={arch.name}", "-Wa,--no-warn", "-c")


def _front(options: tuple[str, ...], extra: tuple[str, ...]) -> tuple[str, ...]:
    return ("-x", "hip", "--cuda-device-only", *options, *extra)


def _run_steps(
    label: str,
    arch: Arch,
    steps: Sequence[tuple[str, ...]],
    source: str,
    made: tuple[str, ...],
    name: str = "kernel.hip",
) -> tuple[list[bytes], str]:
    """Run commands in a folder of their own, on a file of that name: the files that they make, and what they said."""
    with scratch.folder() as folder:
        # Relative names: the folder is in no message, nor in the object, which holds a digest of the path.
        (folder / name).write_text(source)
        log = ""
        for step in steps:
            finished = run(step, cwd=folder)
            log += finished.err
            if finished.failure is not None:
                raise refusal(label, arch.name, finished, source)
        return [(folder / one).read_bytes() for one in made], log


def _wheel_steps(zig: str, front: tuple[str, ...], arch: Arch) -> list[tuple[str, ...]]:
    # In one step its driver looks for a linker program that the wheel has only as a subcommand.
    return [
        (zig, "clang", *front, *_LISTED, "kernel.hip", "-o", "kernel.s"),
        (zig, "clang", *_assembler(arch), "kernel.s", "-o", "kernel.o"),
        (zig, "ld.lld", "-shared", "--strip-debug", "kernel.o", "-o", "kernel.co"),  # lines are the assembly's alone
    ]


def _system(path: str, oldest: int) -> Candidate:
    """Examine a clang on the PATH."""
    beside = os.path.join(os.path.dirname(os.path.realpath(path)), "ld.lld")
    anywhere = shutil.which("ld.lld") or ""
    try:
        facts = recall(("clang", path), [path, beside, anywhere], lambda: _system_facts(path))
    except ProbeFailed as failure:
        return Candidate(path, str(failure))
    version, lld = facts["clang"], facts["lld"]
    reason = too_old(version, oldest)
    if reason is None and not facts["amdgcn"]:
        reason = f"{version} was built without the AMDGPU target"
    if reason is None and major(lld) != major(version):
        reason = f"{version} needs an ld.lld of the same major version, found {lld or 'none'}; install lld"
    return Candidate(path, reason, identity=f"{version}, {lld}", command=(path,))


def _system_facts(path: str) -> Facts:
    """Versions of a clang and of the linker that it would call, and whether it has the AMDGPU target."""
    version = version_line((path,))
    lld = run([path, "-print-prog-name=ld.lld"]).out.strip()
    return {
        "clang": version,
        "amdgcn": "yes" if "amdgcn" in run([path, "-print-targets"]).out else "",
        "lld": version_line((lld,)) if shutil.which(lld) else "",
    }


def _wheel(zig: str, oldest: int) -> Candidate:
    """Examine the `ziglang` wheel."""
    try:
        facts = zig_facts(zig)
    except ProbeFailed as failure:
        return Candidate("ziglang", str(failure))
    identity = f"ziglang {facts['zig']}, {facts['clang']}"
    return Candidate("ziglang", too_old(facts["clang"], oldest), identity=identity, command=(zig,))
