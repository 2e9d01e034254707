"""`hfk ab`: whether one thing makes a kernel or a generation faster, from paired samples in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.cli._errors import FAILED
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.bench.ab import Experiment


def ab(
    kernel: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OFF ON", help="Two routes, for example tile_batched rows8, or two variants."),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=OFF,ON",
            help="One switch (unset: not set), kv_format, block_size, device or route, with its two values.",
        ),
    ] = None,
    device: Annotated[str, _choices.option(_choices.devices, metavar="DEVICE", help="host, cuda:N, hip:N.")] = "host",
    repeats: Annotated[int, typer.Option(help="Of off,on,on,off,off,on; even, at least 4.")] = 6,
    ctx: Annotated[
        int | None, typer.Option(help="Kernel: keys [default: 4096]. Generate: repeat the prompt to so many tokens.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Kernel: query rows. [default: 16]")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Kernel: values per head. [default: 256]")] = None,
    heads: Annotated[str | None, typer.Option(help="Kernel: query/KV heads. [default: 24/4]")] = None,
    extent: _choices.Extents = None,
    rounds: Annotated[int, typer.Option(min=4, help="Kernel: calls of a sample, whose median counts.")] = 20,
    prompt_file: Annotated[Path | None, typer.Option(help="Generate: UTF-8 text. [default: the demo's first]")] = None,
    target: Annotated[Path | None, typer.Option(help="Generate: checkpoint. [default: the demo pair]")] = None,
    draft: Annotated[Path | None, typer.Option(help="Generate: its draft. [default: the demo pair's]")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Generate: new tokens.")] = 64,
    out: Annotated[Path | None, _out.new_file("Also write the JSON document here.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Paired A/B run with a verdict only where there is one. Exit code 1 if the arms differ in more or it is traced."""
    from hipfire_kernels.bench import ab as work
    from hipfire_kernels.bench import pairs

    if (kernel is None) == (generate is None):
        raise InputError("required: one of --kernel OFF ON and --generate NAME=OFF,ON")
    order = pairs.order(repeats)
    experiment: Experiment
    if kernel is not None:
        shape = {"--ctx": ctx, "--rows": rows, "--head-dim": head_dim, "--heads": heads}
        sized = [name for name, value in shape.items() if value is not None]
        cases = _cases(kernel, _choices.extents(extent), sized, device, rounds)
        experiment = cases or _kernel(kernel, ctx or 4096, rows or 16, head_dim or 256, heads or "24/4", device, rounds)
    else:
        experiment = _generate(str(generate), device, target, draft, prompt_file, ctx, max_new_tokens)
    _out.note(f"declared order: {' '.join(order)}")
    with _out.progress("sample", len(order)) as step:
        document = work.run(experiment, repeats, step)
    if as_json:
        _out.document(document)
    else:
        print(work.describe(document))
    _out.save(out, json.dumps(document, indent=1) + "\n")
    if document["judgement"] is None:
        raise typer.Exit(FAILED)


def _cases(
    names: tuple[str, str], extents: dict[str, int], sized: list[str], device: str, rounds: int
) -> Experiment | None:
    """Two variants of families with a reference; None where the names are of attention kernels."""
    from hipfire_kernels.authoring.registry import variants
    from hipfire_kernels.bench.ab_cases import CaseArms, of_reference

    off, on = (of_reference(name, variants()) for name in names)
    if off is None or on is None:
        if extents:
            raise InputError("--extent is for variants of families with a reference; --ctx and --rows size these")
        return None
    if sized:
        raise InputError(f"{sized[0]} is of attention kernels; --extent NAME=N sizes a case of {off.family.name}")
    return CaseArms(off, on, extents, device, rounds)


def _kernel(
    names: tuple[str, str], ctx: int, rows: int, head_dim: int, heads: str, device: str, rounds: int
) -> Experiment:
    from hipfire_kernels.bench.ab_arms import KernelArms
    from hipfire_kernels.bench.kernels import Shape
    from hipfire_kernels.cli.explain import heads_of
    from hipfire_kernels.running.attention import check_heads

    n_heads, n_kv_heads = heads_of(heads)
    check_heads(rows, n_heads, n_kv_heads, head_dim)
    if not 1 <= rows <= ctx:
        raise InputError(f"--ctx is {ctx} with {rows} rows; required: at least the rows")
    return KernelArms(*names, Shape(ctx, rows, head_dim, n_heads, n_kv_heads), device, rounds)


def _generate(
    text: str,
    device: str,
    target: Path | None,
    draft: Path | None,
    prompt_file: Path | None,
    ctx: int | None,
    max_new_tokens: int,
) -> Experiment:
    from hipfire_kernels.bench.ab_arms import GenerateArms, request
    from hipfire_kernels.cli.generate import _prompt

    name, equals, values = text.partition("=")
    off, comma, on = values.partition(",")
    if not (name and equals and comma and off and on) or "," in on:
        raise InputError(f"--generate is {text!r}; required: NAME=OFF,ON, for example HIPFIRE_VERIFY_GRAPH=0,1")
    prompt = None if prompt_file is None else _prompt(None, prompt_file)
    return GenerateArms(name, off, on, request(prompt, target, draft, ctx, max_new_tokens), device)
