"""Compilers. Each answers three questions: can it run here, what exactly is it, and what does it make of a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..archs import Arch


@dataclass(frozen=True)
class Compiled:
    """What a compiler gave back.

    Attributes:
        code: a code object (ELF) for a GPU arch, or a shared object for the host.
        log: the compiler's warnings and remarks, empty when it had none.
    """

    code: bytes
    log: str


class Toolchain(Protocol):
    """One compiler. Implementations hold no state that outlives a call, apart from a memoised probe."""

    name: str

    def targets(self, arch: Arch) -> bool:
        """Whether this compiler could ever build for `arch`."""

    def available(self) -> str | None:
        """None when the compiler can run here, else the reason why not."""

    def identity(self) -> str:
        """Name and full version, and whatever else changes its output. Part of the cache key."""

    def compile(self, source: str, arch: Arch, options: tuple[str, ...] = ()) -> Compiled:
        """Compile one rendered kernel source.

        Raises:
            CompileError: with the compiler's text.
            ToolchainUnavailable: `available()` gave a reason.
        """
