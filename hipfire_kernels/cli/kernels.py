"""`hfk list`, `hfk render`, `hfk build`: the kernels, their sources, what a compiler makes of them."""

from __future__ import annotations

import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.building.resources import IN_MEMORY, LABELS
from hipfire_kernels.cli import _choices, _compare, _errors, _out, _select
from hipfire_kernels.errors import RenderError, ToolchainError

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant


def list_(as_json: _out.Json = False) -> None:
    """Kernel families, their variants and routes. Needs no compiler."""
    from hipfire_kernels.kernels import families

    shown = [_family(name) for name in families()]
    if as_json:
        _out.document(shown)
        return
    for family in shown:
        routes = ", ".join(family["routes"])
        runs = f"route {routes}" if routes else f"no route: {family['unrouted']}"
        print(f"{family['family']}  ({runs})\n  one block owns {family['owns']}")
        rows = [
            [v["entry"], *v["params"].values(), v["block"], v["lds_bytes"], v["graph_safe"]] for v in family["variants"]
        ]
        columns = ["variant", *family["params"], "threads", "LDS bytes", "graph-safe"]
        _out.table(columns, rows, numeric=["threads", "LDS bytes"])
        print()


def _family(name: str) -> dict[str, Any]:
    from hipfire_kernels.dispatch.routes import ROUTES, UNROUTED
    from hipfire_kernels.kernels import families

    family = families()[name]
    return {
        "family": name,
        "owns": family.doc,
        "params": {k: list(legal) for k, legal in family.params.items()},
        "routes": [r.name for r in ROUTES if r.family == name],
        "unrouted": UNROUTED.get(name),
        "variants": [
            {
                "entry": v.entry,
                "params": dict(v.params),
                "block": v.threads(),
                "lds_bytes": v.lds_bytes(),
                "graph_safe": family.graph_safe,
            }
            for v in family.variants()
        ],
    }


def render(
    name: Annotated[str, typer.Argument(metavar="FAMILY", help="A family, or one variant's entry name.")],
    arch: Annotated[str, _choices.option(_choices.archs, metavar="ARCH", help="The arch to render for.")],
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Repeatable.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Print the HIP source of one variant. Needs no compiler."""
    from hipfire_kernels.authoring.render import source_digest

    variant = _select.one(name, param or [])
    source = variant.source(arch)
    if not as_json:
        print(source, end="")
        return
    _out.document({**_named(variant), "arch": arch, "sha256": source_digest(source), "source": source})


def _named(variant: Variant) -> dict[str, Any]:
    return {"entry": variant.entry, "family": variant.family.name, "params": dict(variant.params)}


def build(
    variants: _select.Variants = None,
    *,
    everything: _select.All = False,
    arch: Annotated[
        str,
        _choices.option(_choices.archs_or_all, listed=True, metavar="ARCH,...", help="The archs to build for, or all."),
    ],
    toolchain: Annotated[
        str | None,
        _choices.option(
            _choices.toolchains,
            metavar="NAME",
            help="clang, hiprtc, nvrtc, host, host+undefined or host+address. [default: the first that works]",
        ),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="An earlier --json report: say what changed.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Compile variants, print what they take. Exit code 1 if one spills, has scratch or does not compile."""
    chosen = _select.many(variants or [], everything=everything)
    archs = check_archs(arch, toolchain)
    earlier = _compare.read(against) if against else None
    found = _build_all(chosen, archs, toolchain)
    built = [row for row in found if "resources" in row]
    failures = [row for row in found if "error" in row]
    changes = _compare.changes(earlier, built) if earlier is not None else None
    if as_json:
        _out.document({"kernels": built, "failures": failures, "changes": changes})
    else:
        _print_built(built, archs)
        if changes is not None:
            _compare.show(changes, str(against))
    for row in failures:
        _out.note(f"error: {row['entry']} for {row['arch']}: {row['error']}")
    spilling = [row for row in built if _in_memory(row["resources"])]
    for row in spilling:
        _out.note(f"error: {row['entry']} for {row['arch']} spills: {_in_memory(row['resources'])}")
    if failures or spilling:
        raise typer.Exit(_errors.FAILED)


def check_archs(text: str, toolchain: str | None) -> list[str]:
    """The archs of `--arch`, known and with a compiler that works here. `all`: those a toolchain targets."""
    from hipfire_kernels.archs import ARCHS
    from hipfire_kernels.archs import arch as known
    from hipfire_kernels.building.toolchains.registry import choose, toolchains

    if text == "all":
        names = [name for name, row in ARCHS.items() if any(t.targets(row) for t in toolchains())]
    else:
        names = list(dict.fromkeys(text.split(",")))
    for name in names:
        choose(known(name), toolchain)
    return names


def _build_all(variants: list[Variant], archs: list[str], toolchain: str | None) -> list[dict[str, Any]]:
    """Build every variant for every arch, as many at a time as there are cores: compilers are processes."""
    jobs = [(variant, arch) for arch in archs for variant in variants]
    from hipfire_kernels.building.processes import pool

    with pool() as threads, _out.progress("build", len(jobs)) as step:
        running = [threads.submit(_build_one, variant, arch, toolchain) for variant, arch in jobs]
        for job in as_completed(running):
            step("{entry} {arch}".format(**job.result()))
    return [job.result() for job in running]


def _build_one(variant: Variant, arch: str, toolchain: str | None) -> dict[str, Any]:
    """One row of the report: what the kernel takes, or the error that it gave."""
    from hipfire_kernels.building.builder import build as build_variant

    began = time.perf_counter()
    try:
        artifact = build_variant(variant, arch, toolchain)
    except (ToolchainError, RenderError) as error:
        return {**_named(variant), "arch": arch, "error": _errors.describe(error)}
    return {
        **_named(variant),
        "arch": arch,
        "toolchain": artifact.toolchain,
        "compiler": artifact.compiler,
        "resources": artifact.resources.as_dict(),
        "seconds": time.perf_counter() - began,
        "cached": artifact.cached,
        "key": artifact.key,
        "log": artifact.log,
    }


def _in_memory(resources: dict[str, Any]) -> str:
    """The spills and the scratch of a kernel, in words; empty when there are none."""
    return ", ".join(f"{name} {resources[name]}" for name in IN_MEMORY if resources[name])


def _print_built(built: list[dict[str, Any]], archs: list[str]) -> None:
    for arch in archs:
        rows = [
            [
                row["entry"],
                *("-" if row["resources"][name] is None else row["resources"][name] for name in LABELS),
                f"{row['seconds']:.3f}",
                "yes" if row["cached"] else "no",
            ]
            for row in built
            if row["arch"] == arch
        ]
        compilers = sorted({row["compiler"] for row in built if row["arch"] == arch})
        print(f"{arch}  ({'; '.join(compilers)})")
        _out.table(["kernel", *LABELS.values(), "s", "cached"], rows, numeric=[*LABELS.values(), "s"])
        print()
    for row in built:
        if row["log"].strip():
            _out.note(f"{row['entry']} for {row['arch']}:\n{row['log'].strip()}")
