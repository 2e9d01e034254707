"""Compilers. Each says what it could use here and why, what that is exactly, what it makes of a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hipfire_kernels.archs import Arch
from hipfire_kernels.errors import ToolchainUnavailable


@dataclass(frozen=True)
class Compiled:
    """What a compiler gave back.

    Attributes:
        code: a code object (ELF) for a GPU arch, or a shared object for the host.
        log: the compiler's warnings and remarks, empty when it had none.
        assembly: of a gfx arch, the assembly text that assembles to `code`, with source lines; empty where the compiler
            gives none.
    """

    code: bytes
    log: str
    assembly: str = ""


@dataclass(frozen=True)
class Candidate:
    """One program or library that could serve, as it was found here.

    Attributes:
        label: what it is, for people.
        reason: why it was passed over; None for the one that is used.
        identity: its full version, and whatever else changes its output.
        command: the first words of its command line.
    """

    label: str
    reason: str | None
    identity: str = ""
    command: tuple[str, ...] = ()


class Toolchain(ABC):
    """One way to compile. Holds no state that outlives a call, apart from a memoised probe."""

    name: str

    @abstractmethod
    def targets(self, arch: Arch) -> bool:
        """Whether this toolchain could ever build for `arch`."""

    @abstractmethod
    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        """Those looked at for `arch`, in order. The last one is used if its `reason` is None."""

    @abstractmethod
    def options(self, arch: Arch) -> tuple[str, ...]:
        """The options of every compilation for `arch`. Part of the cache key."""

    @abstractmethod
    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        """Compile one rendered kernel source, with `extra` options behind the usual ones.

        Raises:
            CompileError: with the compiler's text.
            ToolchainUnavailable: `available(arch)` gave a reason.
        """

    def assembly(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> str:
        """The assembly text of a source, with the source lines that it comes from; `extra` as in `compile`.

        Raises:
            CompileError: as `compile`.
            ToolchainUnavailable: this toolchain has none to give here.
        """
        raise ToolchainUnavailable(f"toolchain {self.name} gives no assembly text for {arch.name}; clang and nvrtc do")

    def assemble(self, assembly: str, arch: Arch) -> bytes:
        """The object file that an assembly text is, not linked.

        Raises:
            CompileError: the assembler refuses it.
            ToolchainUnavailable: this toolchain does not assemble.
        """
        raise ToolchainUnavailable(f"toolchain {self.name} assembles nothing for {arch.name}; clang does")

    def available(self, arch: Arch) -> str | None:
        """None when a candidate can build for `arch` here, else why each was passed over."""
        looked_at = self.candidates(arch)
        if looked_at[-1].reason is None:
            return None
        return "; ".join(f"{candidate.label}: {candidate.reason}" for candidate in looked_at)

    def chosen(self, arch: Arch) -> Candidate:
        """The candidate that is used.

        Raises:
            ToolchainUnavailable: there is none.
        """
        reason = self.available(arch)
        if reason is not None:
            raise ToolchainUnavailable(f"toolchain {self.name} cannot build for {arch.name}: {reason}")
        return self.candidates(arch)[-1]

    def identity(self, arch: Arch) -> str:
        """Name and full version, and whatever else changes the output. Part of the cache key.

        Raises:
            ToolchainUnavailable: there is nothing to identify.
        """
        return self.chosen(arch).identity
