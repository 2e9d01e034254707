"""NVIDIA's runtime compiler through cuda-bindings: the same templates on a CUDA card. No card is needed to compile."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hipfire_kernels.archs import Arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.toolchains import Candidate, Compiled, Toolchain
from hipfire_kernels.building.toolchains._process import Finished, refusal, run
from hipfire_kernels.errors import ToolchainError, ToolchainUnavailable


class NvrtcToolchain(Toolchain):
    """nvrtc, in this process, to a cubin for exactly the arch."""

    name = "nvrtc"

    def targets(self, arch: Arch) -> bool:
        """sm archs."""
        return arch.dialect == "nvidia"

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """The one library that cuda-bindings finds."""
        return (_candidate(),)

    def options(self, arch: Arch) -> tuple[str, ...]:
        """Contraction off: kernels that do the same arithmetic must give the same bits."""
        return (f"--gpu-architecture={arch.target or arch.name}", "--std=c++17", "--fmad=false", "--restrict")

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile in this process."""
        self.chosen(arch)
        options = [option.encode() for option in (*self.options(arch), *extra)]
        with _program(source) as (api, program):
            status = api.nvrtcCompileProgram(program, len(options), options)[0]
            log = _text(api, "ProgramLog", program).decode(errors="replace").strip("\0\n ")
            if int(status):
                failure = f"nvrtcCompileProgram: {status.name}"
                raise refusal("nvrtc", arch.name, Finished(failure, "", log), source)
            return Compiled(_text(api, "CUBIN", program), log)

    def assembly(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> str:
        """The machine code through nvdisasm; PTX says nothing about it."""
        program = _nvdisasm()
        if program is None:
            raise ToolchainUnavailable(
                f"the machine code of {arch.name} needs nvdisasm, which is neither on the PATH nor installed as a "
                "package; `pip install nvidia-cuda-nvdisasm` brings one"
            )
        code = self.compile(source, arch, (*extra, "-lineinfo")).code
        with scratch.folder() as folder:
            (folder / "kernel.cubin").write_bytes(code)
            finished = run((program, "--print-code", "--print-line-info-inline", "kernel.cubin"), cwd=folder)
        if finished.failure is not None:
            raise ToolchainError(f"{program} did not read the cubin: {finished.failure}; {finished.err.strip()[:200]}")
        return finished.out


def _nvdisasm() -> str | None:
    """The disassembler: on the PATH, else in NVIDIA's wheel."""
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    programs = sorted(
        path for folder in folders for path in folder.glob("cu*/bin/nvdisasm") if os.access(path, os.X_OK)
    )
    return str(programs[-1]) if programs else None


@functools.cache
def _candidate() -> Candidate:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return Candidate("cuda-bindings", "not installed; `pip install hipfire-kernels[cuda]`")
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise types of their own when the library is absent
        return Candidate("libnvrtc", f"does not load: {error}. `pip install nvidia-cuda-nvrtc` brings one")
    if int(status):
        return Candidate("libnvrtc", f"nvrtcVersion failed: {status.name}")
    return Candidate("libnvrtc", None, identity=f"nvrtc {major}.{minor}")


@contextmanager
def _program(source: str) -> Iterator[tuple[Any, Any]]:
    from cuda.bindings import nvrtc

    program = _out(nvrtc, "nvrtcCreateProgram", source.encode(), b"kernel.cu", 0, [], [])
    try:
        yield nvrtc, program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(api: Any, what: str, program: Any) -> bytes:
    size = _out(api, f"nvrtcGet{what}Size", program)
    # The bindings write into the bytes they are given. Python shares those of one character between all who use it: an
    # empty log, one byte, turned every space of the process into a NUL. These are ours alone.
    data = bytes(size + 2)
    _out(api, f"nvrtcGet{what}", program, data)
    return data[:size]


def _out(api: Any, function: str, *args: Any) -> Any:
    """What a function of the library gives, if anything. ToolchainError: it failed."""
    status, *out = getattr(api, function)(*args)
    if int(status):
        raise ToolchainError(f"{function} failed: {status.name}")
    return out[0] if out else None
