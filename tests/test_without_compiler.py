"""Where no compiler can work: what was built for this very source is served from the cache, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hipfire_kernels import build, families
from hipfire_kernels.archs import arch as arch_row
from hipfire_kernels.building import builder
from hipfire_kernels.building.cache import ArtifactCache
from hipfire_kernels.building.toolchains import host, registry
from hipfire_kernels.errors import ToolchainUnavailable

VARIANT = families()["attention_flash_reduce_batched"].variant(head_dim=32, bound="causal")


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def leave() -> None:
        for toolchain in registry.toolchains():
            monkeypatch.setattr(toolchain, "available", lambda arch: "it has left")

    return leave


@pytest.mark.parametrize("arch", ["gfx1100", "host"])
def test_the_artifact_is_served(arch: str, tmp_path: Path, gone: Callable[[], None]) -> None:
    made = build(VARIANT, arch, cache=ArtifactCache(tmp_path))
    gone()
    served = build(VARIANT, arch, cache=ArtifactCache(tmp_path))
    assert served == replace(made, cached=True)


def test_of_two_compilers_that_are_gone_the_later(tmp_path: Path, gone: Callable[[], None]) -> None:
    cache = ArtifactCache(tmp_path)
    made = build(VARIANT, cache=cache)
    entry = next(cache.entries())
    target = arch_row("gfx1100")
    for compiler, created in (("clang 1", "2001-01-01"), ("clang 99", "2999-01-01"), ("clang 3", "2003-01-01")):
        key = builder._key(VARIANT, target, registry.choose(target), compiler, made.source)
        cache.put(replace(entry, key=key, compiler=compiler, created=created))
    gone()
    assert build(VARIANT, cache=ArtifactCache(tmp_path)).compiler == "clang 99"


def test_nothing_else_is(tmp_path: Path, gone: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another source's, arch's, CPU's, nor what was altered, nor what a named compiler would make."""
    for arch in ("gfx1100", "host"):
        build(VARIANT, arch, cache=ArtifactCache(tmp_path))
    gone()
    render = type(VARIANT).source

    def refused(arch: str = "gfx1100", toolchain: str | None = None) -> None:
        with pytest.raises(ToolchainUnavailable, match="it has left"):
            build(VARIANT, arch, toolchain, cache=ArtifactCache(tmp_path))

    refused("gfx1201")
    refused(toolchain="clang")
    with monkeypatch.context() as patch:
        patch.setattr(type(VARIANT), "source", lambda variant, arch: f"{render(variant, arch)}// edited\n")
        refused()
    with monkeypatch.context() as patch:
        patch.setattr(host, "machine", lambda: "another cpu")
        refused("host")
        build(VARIANT, "gfx1100", cache=ArtifactCache(tmp_path))
    for path in (tmp_path / "artifacts").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    refused()
    refused("host")
