"""`hfk lint`: what is wrong with the templates, without running them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hipfire_kernels.cli import _out, _select
from hipfire_kernels.cli._errors import FAILED


def lint(
    variants: _select.Variants = None,
    every: Annotated[bool, typer.Option("--every", help="Compile every variant, not one for each code path.")] = False,
    as_json: _out.Json = False,
) -> None:
    """Check templates: columns, names, rendering, compiler warnings, address spaces, private memory, LDS.

    With no VARIANT: all. Exit code 1 if something is wrong.
    """
    from hipfire_kernels.inspecting.lint import lint as check

    chosen = _select.many(variants or [], everything=not variants)
    found = check(chosen, every=every)
    if as_json:
        _out.document(dataclasses.asdict(found))
    else:
        for finding in found.findings:
            print(f"{finding.where}: {finding.rule}: {finding.text}")
        seen = f"{len(chosen)} variants, {found.rendered} renderings, {found.compiled} compiled"
        print(f"{seen}: {len(found.findings) or 'nothing'} wrong")
    for arch, reason in found.skipped.items():
        _out.note(f"nothing was compiled for {arch}: {reason}")
    if found.findings:
        raise typer.Exit(FAILED)
