"""`hfk convert`: a checkpoint folder to a .hfq container, quantised."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.model.convert import Conversion


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a Qwen3.5 checkpoint or of a DFlash draft.")],
    out: Annotated[Path, _out.new_file_argument("The container to write: NAME.hfq or NAME.mq4.")],
    wanted: Annotated[
        str,
        _choices.option(("mq4", "q8", "f16", "f32"), "--format", help="Of the matrices: mq4 4.25 bits, q8 8.5 bits."),
    ] = "mq4",
    as_json: _out.Json = False,
) -> None:
    """Quantise a checkpoint into one .hfq container, which `generate` takes in place of the folder.

    With mq4 the embedding and the output head get q8, as do matrices whose rows are no multiple of 256. Norms,
    convolutions and what fits neither stay f32.
    """
    from hipfire_kernels.model.convert import Conversion

    conversion = Conversion(source, wanted)
    try:
        with _out.progress("convert", len(conversion.tensors)) as step:
            conversion.write(out, lambda tensor: step(f"{tensor.name} {tensor.format.name}"))
        size = out.stat().st_size
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror})") from error
    document = _document(source, out, conversion, size)
    if as_json:
        _out.document(document)
    else:
        _show(document)


def _document(source: Path, out: Path, conversion: Conversion, size: int) -> dict[str, Any]:
    tensors = [
        {
            "name": tensor.name,
            "shape": tensor.shape,
            "source_format": entry.format.name,
            "source_bytes": entry.end - entry.begin,
            "format": tensor.format.name,
            "bytes": tensor.format.size(tensor.shape),
        }
        for entry, tensor in zip(conversion.entries, conversion.tensors, strict=True)
    ]
    return {
        "source": str(source),
        "out": str(out),
        "arch_id": conversion.arch_id,
        "source_bytes": sum(t["source_bytes"] for t in tensors),
        "bytes": size,
        "tensors": tensors,
        "skipped": conversion.skipped,
    }


def _show(document: dict[str, Any]) -> None:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for tensor in document["tensors"]:
        groups[tensor["format"]].append(tensor)
    rows = [
        [
            name,
            len(group),
            _megabytes(sum(t["source_bytes"] for t in group)),
            _megabytes(sum(t["bytes"] for t in group)),
        ]
        for name, group in groups.items()
    ]
    columns = ["format", "tensors", "MB before", "MB after"]
    _out.table(columns, rows, numeric=columns[1:])
    if document["skipped"]:
        print(f"{len(document['skipped'])} tensors left out (vision, multi-token prediction)")
    before, after = document["source_bytes"], document["bytes"]
    print(f"\n{document['out']}: {_megabytes(after)} MB, {after / before:.0%} of {_megabytes(before)} MB")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"
