"""NVIDIA's runtime compiler through cuda-bindings: the same templates on a CUDA card. No card is needed to compile."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..archs import Arch
from ..errors import ToolchainError
from . import Candidate, Compiled, Toolchain
from ._process import Finished, refusal


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
        return (f"--gpu-architecture={arch.name}", "--std=c++17", "--fmad=false", "--restrict")

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

    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    if int(status):
        raise ToolchainError(f"nvrtcCreateProgram failed: {status.name}")
    try:
        yield nvrtc, program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(api: Any, what: str, program: Any) -> bytes:
    status, size = getattr(api, f"nvrtcGet{what}Size")(program)
    data: bytes = b" " * size
    if not int(status):
        (status,) = getattr(api, f"nvrtcGet{what}")(program, data)
    if int(status):
        raise ToolchainError(f"nvrtcGet{what} failed: {status.name}")
    return data
