"""`hfk bench`: the kernel table of a GPU, in one interleaved run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.errors import DeviceError, InputError


def bench(
    device: Annotated[
        str, _choices.option(_choices.devices, metavar="DEVICE", help="A GPU: cuda:N, hip:N, or auto for the first.")
    ] = "auto",
    ctx: Annotated[str, typer.Option(help="Contexts, comma-separated.")] = "2048,4096,20676,32768,131072",
    rows: Annotated[str, typer.Option(help="Query rows, comma-separated.")] = "4,8,16,32",
    head_dim: Annotated[str, typer.Option(help="head_dims, comma-separated.")] = "128,256",
    rounds: Annotated[int, typer.Option(min=4, help="Times each route is timed per shape.")] = 30,
    no_check: Annotated[bool, typer.Option("--no-check", help="Skip the float64 oracle.")] = False,
    out: Annotated[Path | None, _out.new_file("Also write the JSON document here.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Time every route on the device: cold L2, median and quartiles, ratio to the established route, worst error."""
    from hipfire_kernels.bench import kernels
    from hipfire_kernels.running.devices import device as open_device
    from hipfire_kernels.running.devices.gpu import GpuDevice

    lists = {"--ctx": ctx, "--rows": rows, "--head-dim": head_dim}
    contexts, row_counts, head_dims = (numbers(name, text) for name, text in lists.items())
    if wrong := set(head_dims) - set(kernels.HEAD_DIMS):
        raise InputError(f"--head-dim is {min(wrong)}; legal: {', '.join(map(str, kernels.HEAD_DIMS))}")
    if min(contexts) < max(row_counts):
        raise InputError(f"--ctx is {min(contexts)} with {max(row_counts)} rows; required: at least the rows")
    on = open_device(device)
    if not isinstance(on, GpuDevice):
        raise DeviceError(f"{on.name} has no device events to time with; pass a GPU with --device")
    shapes = [kernels.Shape(c, b, d) for d in head_dims for b in row_counts for c in contexts]
    document = kernels.provenance(on)
    with _out.progress("shape", len(shapes)) as step:
        document["rows"] = kernels.table(on, shapes, rounds, not no_check, step)
    if as_json:
        _out.document(document)
    else:
        driver = document.get("driver") or document["driver_api"]
        print(f"{document['name']}, driver {driver}, {document['compiler']}, {document['date']}")
        print("\n".join(kernels.describe(row) for row in document["rows"]))
    _out.save(out, json.dumps(document, indent=1) + "\n")


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of an option."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError(f"{name} is {text!r}; required: positive whole numbers, comma-separated")
    return found
