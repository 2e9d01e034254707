"""Variant to artifact: render, look in the bundle and the cache, else compile and read what the kernel takes."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from hipfire_kernels.archs import Arch
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.building import bundle
from hipfire_kernels.building.cache import ArtifactCache, Entry, artifact_key, default_cache, pack_text, unpack_text
from hipfire_kernels.building.cubin import read_cubin
from hipfire_kernels.building.resources import FIELDS, Resources, read_resources
from hipfire_kernels.building.toolchains import Toolchain, host
from hipfire_kernels.building.toolchains.registry import choose, toolchains
from hipfire_kernels.errors import ToolchainUnavailable

log = logging.getLogger(__name__)
"""Says on the level of information what is compiled, while it is."""


class Buildable(Protocol):
    """What `build` asks of a kernel. `family.Variant` is one."""

    @property
    def entry(self) -> str:
        """The kernel's symbol."""

    def lds_bytes(self, arch: str) -> int:
        """LDS of one workgroup on an arch, in bytes."""

    def threads(self, arch: str) -> int:
        """Threads of a workgroup on an arch."""

    def source(self, arch: str) -> str:
        """The rendered source."""


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
        code: code object for a GPU arch, shared object for the host.
        resources: what it takes from the machine.
        log: the compiler's warnings.
        key: its key in the artifact cache.
        cached: whether it was found there rather than compiled by this call.
        arch: exact arch name.
        toolchain: the toolchain's name.
        compiler: the toolchain's identity: full version and what else changes its output.
        entry: the kernel's symbol.
        source: the source it was compiled from.
        listing: see `assembly`; packed.
    """

    code: bytes = field(repr=False)
    resources: Resources
    log: str
    key: str
    cached: bool
    arch: str
    toolchain: str
    compiler: str
    entry: str
    source: str = field(repr=False)
    listing: str = field(repr=False, default="")

    @property
    def assembly(self) -> str:
        """The assembly text that assembles to `code`, with source lines; empty where the toolchain gave none: hiprtc,
        and bundles."""
        return unpack_text(self.listing)


def build(
    variant: Buildable,
    arch: str = "gfx1100",
    toolchain: str | Toolchain | None = None,
    cache: ArtifactCache | None = None,
) -> Artifact:
    """Compile a variant for an arch, or find it compiled.

    Args:
        variant: the kernel.
        arch: exact arch name.
        toolchain: one, or its name; by default the first that works here.
        cache: where to look and keep; by default the user's.

    Raises:
        InputError: the arch is unknown, or the toolchain does not build for it.
        RenderError: the kernel does not fit the arch.
        ToolchainUnavailable: no compiler can work here, and none made an artifact of this source that the cache has.
        CompileError: the compiler refused the source.
    """
    target = lookup(arch)
    source = variant.source(target.name)
    # A compiler or a cache that is asked for is used: the bundle has no say then, in a refusal neither.
    bundled = bundle.current() if toolchain is None and cache is None else None
    if bundled is not None:
        found = bundled.find(variant.entry, target.name, source, host.machine)
        if found is not None:
            return _from_bundle(*found, source)
    store = default_cache() if cache is None else cache
    try:
        compiler = choose(target, toolchain)
    except ToolchainUnavailable as error:
        kept = _kept(variant, target, source, store) if toolchain is None else None
        if kept is not None:
            log.info("no compiler for %s here: %s is what %s made of it", target.name, variant.entry, kept.compiler)
            return _artifact(kept, source, cached=True)
        if bundled is None:
            raise
        why = bundled.missing(variant.entry, target.name, source, host.machine)
        raise ToolchainUnavailable(f"{why}\n{error}") from None
    identity = compiler.identity(target)
    key = _key(variant, target, compiler, identity, source)
    make = functools.partial(_compile, variant, target, compiler, identity, source, key)
    entry, cached = store.get_or_build(key, target.name, make)
    return _artifact(entry, source, cached=cached)


def _kept(variant: Buildable, target: Arch, source: str, store: ArtifactCache) -> Entry | None:
    """What a compiler that is here no more made of this very source, the latest; None where it made nothing.

    An entry's key, computed anew with the compiler that it names, says that all else is the same too. Code for the host
    is for one kind of CPU, which the compiler's identity ends with.
    """
    legal = {one.name: one for one in toolchains() if one.targets(target)}
    found = [
        entry
        for entry in store.entries(variant.entry, target.name)
        if entry.toolchain in legal
        and entry.key == _key(variant, target, legal[entry.toolchain], entry.compiler, source)
        and (target.dialect != "host" or entry.compiler.endswith(host.machine()))
    ]
    return max(found, key=lambda entry: entry.created, default=None)


def _artifact(entry: Entry, source: str, *, cached: bool) -> Artifact:
    return Artifact(
        code=entry.code,
        resources=Resources.from_dict(entry.resources),
        log=entry.log,
        key=entry.key,
        cached=cached,
        arch=entry.arch,
        toolchain=entry.toolchain,
        compiler=entry.compiler,
        entry=entry.entry,
        source=source,
        listing=entry.listing,
    )


def _key(variant: Buildable, target: Arch, compiler: Toolchain, identity: str, source: str) -> str:
    """Of all that shapes an entry: the arch's whole row, what a declaration says of itself, and the fields of the
    report shape the resources that it holds."""
    return artifact_key(
        source,
        variant.entry,
        repr(target),
        _declared(variant, target),
        compiler.name,
        identity,
        list(compiler.options(target)),
        list(FIELDS),
    )


def _from_bundle(kernel: bundle.Bundled, code: bytes, source: str) -> Artifact:
    return Artifact(
        code=code,
        resources=kernel.report(),
        log=kernel.log,
        key=f"{bundle.digest(source.encode())}-{kernel.sha256}",
        cached=True,
        arch=kernel.arch,
        toolchain=kernel.toolchain,
        compiler=kernel.compiler,
        entry=kernel.entry,
        source=source,
    )


def write_bundle(kernels: Iterable[tuple[Buildable, str]], folder: str | os.PathLike[str]) -> Path:
    """Build kernels, each for an arch, into a bundle.

    Returns:
        The manifest.

    Raises:
        InputError: the folder holds a bundle already, or cannot be written; else as `build`.
    """

    def built() -> Iterator[tuple[bundle.Bundled, bytes]]:
        for variant, arch in kernels:
            made = build(variant, arch)
            sha256 = bundle.digest(made.code)
            machine = host.machine() if lookup(made.arch).dialect == "host" else ""
            told = bundle.Bundled(
                made.entry,
                made.arch,
                bundle.digest(made.source.encode()),
                f"{sha256}.code",
                sha256,
                made.toolchain,
                made.compiler,
                dict(made.resources.as_dict()),
                made.log,
                machine,
            )
            yield told, made.code

    return bundle.write(built(), folder)


def _declared(variant: Buildable, arch: Arch) -> list[int]:
    """What the report takes from the declaration, where the compiled code does not say: LDS and threads of a block."""
    if arch.dialect == "amd":
        return []
    return [variant.lds_bytes(arch.name), *([variant.threads(arch.name)] if arch.dialect == "nvidia" else [])]


def _compile(variant: Buildable, arch: Arch, compiler: Toolchain, identity: str, source: str, key: str) -> Entry:
    log.info("compiling %s for %s", variant.entry, arch.name)
    compiled = compiler.compile(source, arch)
    if arch.dialect == "amd":
        resources = read_resources(compiled.code, arch, variant.entry)
    elif arch.dialect == "nvidia":
        lds_bytes, threads = _declared(variant, arch)
        resources = read_cubin(compiled.code, arch, variant.entry, lds_bytes, threads)
    else:
        (lds_bytes,) = _declared(variant, arch)
        resources = Resources(lds_bytes=lds_bytes)
    return Entry(
        key=key,
        arch=arch.name,
        entry=variant.entry,
        toolchain=compiler.name,
        compiler=identity,
        resources=dict(resources.as_dict()),
        log=compiled.log,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code=compiled.code,
        listing=pack_text(compiled.assembly),
    )
