"""ROCm's runtime compiler through hip-python: what a program on an AMD machine would use. Compiles only."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hipfire_kernels.archs import Arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.toolchains import Candidate, Compiled, Toolchain
from hipfire_kernels.building.toolchains._probe import Facts, ProbeFailed, recall
from hipfire_kernels.building.toolchains._process import Finished, refusal, run
from hipfire_kernels.errors import CompileError

_OPTIONS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",  # kernels that do the same arithmetic must give the same bits
    "-mno-cumode",  # some releases add -mcumode, some do not; occupancy is reckoned for a whole WGP
    "-Wall",
    "-Wextra",
)

_CHILD = Path(__file__).with_name("_hiprtc_child.py")
_PROBE = 'extern "C" __global__ void probe() {}\n'
_LABEL = "libhiprtc"


class HiprtcToolchain(Toolchain):
    """hiprtc, always in a child process: the library aborts on an arch it does not know."""

    name = "hiprtc"

    def targets(self, arch: Arch) -> bool:
        """gfx archs."""
        return arch.dialect == "amd"

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """The one library that hip-python finds, tried on an empty kernel for `arch`."""
        if importlib.util.find_spec("hip") is None:
            return (Candidate("hip-python", "not installed; `pip install hip-python`"),)
        try:
            facts = recall((_LABEL, arch.name, sys.executable), _places(), lambda: self._probe(arch))
        except ProbeFailed as failure:
            return (Candidate(_LABEL, str(failure)),)
        return (Candidate(_LABEL, None, identity=facts["identity"]),)

    def options(self, arch: Arch) -> tuple[str, ...]:
        """The same for every gfx arch."""
        return (*_OPTIONS, f"--offload-arch={arch.name}")

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile in a child process. A child that aborts or hangs is a CompileError like any other."""
        self.chosen(arch)
        done = _compile(source, (*self.options(arch), *extra))
        if done.stage == "done":
            return Compiled(done.code, done.log)
        raise _refusal(done, arch, source)

    def _probe(self, arch: Arch) -> Facts:
        done = _compile(_PROBE, self.options(arch))
        if done.stage == "done":
            return {"identity": done.identity}
        if done.stage == "import":
            raise ProbeFailed(f"hip-python cannot be imported: {done.why}")
        if done.stage == "load":
            raise ProbeFailed(f"the library does not load: {done.why}. Install ROCm's hiprtc, or point ROCM_PATH at it")
        raise ProbeFailed(f"it cannot compile an empty kernel for {arch.name}: {_explained(done)}")


@dataclass(frozen=True)
class _Done:
    """How far a child came: its last stage, what it left, and how it ended."""

    stage: str
    error: str
    log: str
    identity: str
    code: bytes
    finished: Finished

    @property
    def why(self) -> str:
        """The child's own words, or how it ended without any."""
        return self.error or f"the compiling process: {self.finished.failure}"


def _compile(source: str, options: tuple[str, ...]) -> _Done:
    with scratch.folder() as folder:
        (folder / "kernel.hip").write_text(source)
        # comgr would keep a second cache, in a place of its own; and when it aborts, its temporary files.
        env = {**os.environ, "AMD_COMGR_CACHE": "0"}
        finished = run([sys.executable, str(_CHILD), str(folder), *options], cwd=folder, env=env)
        answer: dict[str, str] = {"stage": "import", "error": "", "log": "", "identity": ""}
        if (folder / "answer.json").exists():
            answer = json.loads((folder / "answer.json").read_bytes())
        code = (folder / "kernel.co").read_bytes() if answer["stage"] == "done" else b""
    return _Done(**answer, code=code, finished=finished)


def _explained(done: _Done) -> str:
    if done.finished.failure is not None and "SIGABRT" in done.finished.failure:
        return f"{done.why}. Releases do that on an arch they do not know: use a newer one, or toolchain 'clang'"
    return done.why


def _refusal(done: _Done, arch: Arch, source: str) -> CompileError:
    if done.log.strip():
        return refusal("hiprtc", arch.name, Finished(done.why, "", done.log), source)
    return CompileError(
        f"hiprtc did not compile the source for {arch.name}: {_explained(done)}",
        log=done.finished.err,
        source=source,
    )


def _places() -> list[str]:
    """Files whose change can mean another library: hip-python, its search path, the linker's cache."""
    names = [os.environ.get("ROCM_PATH", ""), os.environ.get("ROCM_HOME", ""), "/opt/rocm"]
    folders = [os.path.join(name, "lib") for name in names] + os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = [importlib.util.find_spec(package) for package in ("hip", "rocm_sdk")]
    files = [spec.origin for spec in found if spec is not None and spec.origin is not None]
    libraries = [os.path.join(folder, f"lib{stem}.so") for folder in folders for stem in ("hiprtc", "amd_comgr")]
    return [*files, *libraries, "/etc/ld.so.cache"]
