"""Folders of first runs, made without a card; and the stand-in for HIP with what the steps of one need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from standin_lab import HIP, SOURCES, compile_library, environment, make_ready

from hipfire_kernels import __version__, families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench.firstlight import early, runner, steps
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.matrix_probe import PROBE
from hipfire_kernels.dispatch import runfolder
from hipfire_kernels.dispatch.runfolder import PASSED, Asked, Folder, Result

KV, REDUCE, TILE, ROWS = (
    "kv_cache_write_q8_0_batched",
    "attention_flash_reduce_batched",
    "attention_flash_q8_0_tile_batched",
    "attention_flash_q8_0_rows",
)


def asked(device: str = "hip:0", names: Iterable[str] = (KV,), **more: Any) -> Asked:
    return Asked(
        device,
        **{
            "few": True,
            "families": steps.in_order(list(names)),
            "version": __version__,
            "templates": steps.templates_digest(),
            **more,
        },
    )


def passed(folder: Folder, *names: str, facts: dict[str, Any] | None = None) -> None:
    """Have these steps behind us."""
    for name in names:
        folder.keep(Result(name, PASSED, ("made up",), runfolder.now(), 0.1, facts or {}))


def quiet(folder: Folder, **more: Any) -> runner.Runner:
    return runner.Runner(folder, lambda step: None, lambda step, result, known: None, **more)


def hfk(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process."""
    path = os.pathsep.join(filter(None, (str(SOURCES.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "hipfire_kernels.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
    )


# ---- the stand-in ---------------------------------------------------------------------------------------------------


def few(name: str) -> list[Variant]:
    """What a run of few launches of a family."""
    return steps.variants(name, "gfx1100", few=True)


def install(root: Path, names: Iterable[str] = (KV, REDUCE)) -> dict[str, str]:
    """The stand-in's libraries and kernels, and what a process needs to find them."""
    lib, kernels = root / "lib", root / "kernels"
    for made in (lib, kernels):
        made.mkdir(parents=True)
    for source, files in HIP.libraries.items():
        for file in files:
            (lib / file).write_bytes(compile_library(source))
    for variant in (early.TRIVIAL.variant(), PROBE.variant(), *(v for name in names for v in few(name))):
        make_ready(kernels, HIP, variant)
    return environment(root, HIP)


def replace_body(root: Path, variant: Variant, template: str, old: str, new: str) -> None:
    """Have the stand-in run a kernel with one line of a template changed; what is compiled for it stays."""
    original = templates._environment(None)
    plain = templates._environment
    assert original.loader is not None
    source, _, _ = original.loader.get_source(original, template)
    assert old in source
    edited = jinja2.ChoiceLoader([jinja2.DictLoader({template: source.replace(old, new)}), original.loader])
    mutated = original.overlay(loader=edited, cache_size=0)
    try:
        templates._environment = lambda folder: mutated  # type: ignore[assignment]
        fresh = next(v for v in (PROBE, *families().values()) if v.name == variant.family.name).variant(
            **dict(variant.params)
        )
        (root / "kernels" / f"{variant.entry}.so").write_bytes(build(fresh, "host").code)
    finally:
        templates._environment = plain


def document(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
