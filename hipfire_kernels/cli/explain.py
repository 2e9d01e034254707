"""`hfk explain`: which route a request takes, and why each other one does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.cli._errors import REFUSED
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.dispatch import Decision

_SHAPES: dict[str, dict[str, Any]] = {
    "verify": {"kv_format": "q8_0", "head_dim": 256, "heads": "24/4"},
    "draft": {"kv_format": "f32", "head_dim": 128, "heads": "32/8"},
}
"""What an option left out stands for: the shapes of Qwen3.5-27B and its draft."""


def explain(
    arch: Annotated[
        str, _choices.option(_choices.archs_or_all, metavar="ARCH", help="gfx1100, ...; all: one line for each arch.")
    ],
    workload: Annotated[str, _choices.option(tuple(_SHAPES), help="Whose attention.")] = "verify",
    kv_format: Annotated[
        str | None, _choices.option(("q8_0", "f16", "f32"), help="Of the cache. [default: q8_0; draft: f32]")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Values per head. [default: 256; draft: 128]")] = None,
    heads: Annotated[str | None, typer.Option(help="Query/KV heads. [default: 24/4; draft: 32/8]")] = None,
    rows: Annotated[int, typer.Option(help="Query rows.")] = 16,
    ctx: Annotated[int, typer.Option(help="Live context: keys the last row may see.")] = 32768,
    layout: Annotated[
        str, _choices.option(("chain", "tree", "independent"), help="How the rows depend on each other.")
    ] = "chain",
    window: Annotated[int, typer.Option(help="Keys a row sees; 0 for all.")] = 0,
    capturing: Annotated[bool, typer.Option("--capturing", help="A graph is being captured.")] = False,
    recording: Annotated[bool, typer.Option("--recording", help="Launches are recorded for replay.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Draft: a row sees none behind it.")] = False,
    as_json: _out.Json = False,
) -> None:
    """Which route a request takes, why not the others. Exit code 3 if nothing may run it."""
    from hipfire_kernels.archs import ARCHS
    from hipfire_kernels.dispatch import AttendRequest, admit

    shape = _SHAPES[workload]
    n_heads, n_kv_heads = heads_of(heads or shape["heads"])
    request = AttendRequest(
        arch=arch,
        workload=workload,
        kv_format=kv_format or shape["kv_format"],
        head_dim=head_dim if head_dim is not None else shape["head_dim"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        rows=rows,
        logical_ctx=ctx,
        layout=layout,
        capturing=capturing,
        recording=recording,
        window=window,
        causal=causal,
    )
    if arch == "all":
        decisions = [admit(replace(request, arch=name)) for name in ARCHS]
        _show_all(decisions, as_json)
    else:
        decisions = [admit(request)]
        _show_one(decisions[0], as_json)
    if not any(d.route for d in decisions):
        raise typer.Exit(REFUSED)


def heads_of(text: str) -> tuple[int, int]:
    """Query heads and KV heads of an option."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise InputError(f"--heads is {text!r}; required: query heads / KV heads, for example 24/4")
    return int(parts[0]), int(parts[1])


def _show_one(decision: Decision, as_json: bool) -> None:
    if as_json:
        _out.document(decision.as_dict())
        return
    names = dict.fromkeys(c.name for found in decision.checks.values() for c in found)
    rows = [[name, _observed(decision, name), *_verdicts(decision, name)] for name in names]
    _out.table(["check", "request", *decision.checks], rows)
    print(f"\n{decision.explain()}")


def _observed(decision: Decision, name: str) -> str:
    """What a check saw; several values where routes saw different ones."""
    seen = (str(c.observed) for found in decision.checks.values() for c in found if c.name == name)
    return " / ".join(dict.fromkeys(seen))


def _verdicts(decision: Decision, name: str) -> list[str]:
    """For each route `ok`, `NO`, or nothing where it does not ask."""
    verdicts = [[c.ok for c in found if c.name == name] for found in decision.checks.values()]
    return [("ok" if all(v) else "NO") if v else "" for v in verdicts]


def _show_all(decisions: Sequence[Decision], as_json: bool) -> None:
    if as_json:
        _out.document([d.as_dict() for d in decisions])
        return
    rows = [
        [
            d.request.arch,
            d.route or "none",
            d.fallback or "",
            d.evidence.kind if d.evidence else "",
            "; ".join(f"{name}: {', '.join(c.name for c in failed)}" for name, failed in d.rejected.items()),
        ]
        for d in decisions
    ]
    _out.table(["arch", "route", "falls back to", "evidence", "not admitted, for"], rows)
