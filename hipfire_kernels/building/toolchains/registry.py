"""The toolchains, in order of preference, and the choice of one for an arch."""

from __future__ import annotations

import functools

from hipfire_kernels.archs import Arch
from hipfire_kernels.building.toolchains import Toolchain
from hipfire_kernels.errors import InputError, ToolchainUnavailable


@functools.cache
def toolchains() -> tuple[Toolchain, ...]:
    """Every toolchain, the preferred first.

    clang comes before hiprtc: what it makes does not depend on the ROCm release of the machine, so a kernel
    has the same registers, cache key and evidence everywhere; and it cannot take the process down. hiprtc is
    for asking what an installed ROCm makes of a kernel.
    """
    from hipfire_kernels.building.toolchains.clang import ClangToolchain
    from hipfire_kernels.building.toolchains.hiprtc import HiprtcToolchain
    from hipfire_kernels.building.toolchains.host import HostToolchain
    from hipfire_kernels.building.toolchains.nvrtc import NvrtcToolchain

    return (ClangToolchain(), HiprtcToolchain(), NvrtcToolchain(), HostToolchain())


@functools.cache
def sanitized() -> tuple[Toolchain, ...]:
    """Toolchains that are taken by name alone: the host's with a sanitizer."""
    from hipfire_kernels.building.toolchains.sanitized import ADDRESS, UNDEFINED, SanitizedToolchain

    return (SanitizedToolchain(UNDEFINED), SanitizedToolchain(ADDRESS))


def choose(arch: Arch, wanted: str | Toolchain | None = None) -> Toolchain:
    """The toolchain of that name, or that one itself, or the first that can build for `arch` here.

    Raises:
        InputError: no toolchain has that name, or it does not build for `arch`.
        ToolchainUnavailable: none can work here, with the reason of every candidate.
    """
    known = (
        (wanted,)
        if isinstance(wanted, Toolchain)
        else toolchains()
        if wanted is None
        else (*toolchains(), *sanitized())
    )
    name = wanted.name if isinstance(wanted, Toolchain) else wanted
    legal = [toolchain for toolchain in known if toolchain.targets(arch) and name in (None, toolchain.name)]
    if not legal:
        fit = ", ".join(toolchain.name for toolchain in toolchains() if toolchain.targets(arch))
        raise InputError(f"toolchain {name!r} does not build for {arch.name}; those that do: {fit or 'none'}")
    reasons = []
    for toolchain in legal:
        reason = toolchain.available(arch)
        if reason is None:
            return toolchain
        reasons.append(f"  {toolchain.name}: {reason}")
    if name is None and arch.dialect != "nvidia":
        reasons.append("`pip install ziglang` brings one")
    raise ToolchainUnavailable("\n".join([f"no compiler for {arch.name} can work here:", *reasons]))
