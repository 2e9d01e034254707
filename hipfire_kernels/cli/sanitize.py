"""`hfk sanitize`: kernels on the host under a sanitizer, or their machine code under the interpreter's checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hipfire_kernels.cli import _choices, _out, _select


def sanitize(
    variants: _select.Variants = None,
    everything: _select.All = False,
    kind: Annotated[
        str,
        _choices.option(
            ("undefined", "address"),
            help="undefined: overflow, indices, alignment, conversions. address: memory out of bounds.",
        ),
    ] = "undefined",
    device: Annotated[
        str,
        _choices.option(
            _choices.checked_devices, metavar="DEVICE", help="host, or isa:ARCH: machine code, with all its checks."
        ),
    ] = "host",
    count: Annotated[int, typer.Option(min=0, help="Drawn cases, behind the known ones.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn cases.")] = 0,
    out: Annotated[Path, _out.new_folder("Folder for failing cases.")] = Path("fuzz-failures"),
    as_json: _out.Json = False,
) -> None:
    """Run the cases of `hfk fuzz` on kernels compiled with a sanitizer. Exit code 1 if it finds something.

    On the host the same as `hfk fuzz --device host+KIND`, in processes started as the sanitizer needs it. On isa:ARCH
    the same as `hfk fuzz` there: what nobody wrote, missing waits and barriers, accesses outside of arrays and LDS.
    """
    from hipfire_kernels.archs import arch
    from hipfire_kernels.building.processes import unheard
    from hipfire_kernels.building.toolchains import sanitized

    _select.many(variants or [], everything=everything)  # a wrong name is said here
    more = sanitized.environment(arch("host")) if kind == sanitized.ADDRESS and device == "host" else {}
    where = f"host+{kind}" if device == "host" else device
    names = ["--all"] if everything else list(variants or [])
    command = [sys.executable, "-m", "hipfire_kernels.cli", "fuzz", *names, "--device", where]
    command += ["--count", str(count), "--seed", str(seed), "--out", str(out), *(["--json"] if as_json else [])]
    with unheard():
        running = subprocess.Popen(command, env={**os.environ, **more})
    raise typer.Exit(running.wait())
