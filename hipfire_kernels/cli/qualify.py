"""`hfk qualify`: earn the evidence that opens the fast routes on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.cli._errors import FAILED, refuse
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.dispatch.measure import Settings
    from hipfire_kernels.dispatch.qualify import Journal, Result, Step
    from hipfire_kernels.dispatch.record import Evidence
    from hipfire_kernels.running.devices.protocol import Device


def qualify(
    device: Annotated[
        str, _choices.option(_choices.devices, metavar="DEVICE", help="auto: the first GPU. host: the CPU.")
    ] = "auto",
    route: Annotated[
        list[str] | None,
        _choices.option(_choices.routes, metavar="ROUTE", help="A route; may be repeated. [default: all]"),
    ] = None,
    head_dim: Annotated[str, typer.Option(help="head_dims, comma-separated.")] = "128,256",
    heads: Annotated[
        str | None, typer.Option(help="Query/KV heads; split routes open for their ratio. [default: 24/4; host: 6/1]")
    ] = None,
    out: Annotated[Path | None, _out.new_file("[default: ARCH.json in the user's evidence folder]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps; measure and write nothing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, contexts and rounds.")] = False,
    as_json: _out.Json = False,
) -> None:
    """Parity, resources and paired timing of the routes that need evidence, as a table and an evidence file.

    Interrupted, it goes on where it was when it is run again. Exit code 0: all qualify; 1: one does not; 3: no device.
    """
    from hipfire_kernels.dispatch import measure
    from hipfire_kernels.dispatch import qualify as work

    on = _open(device)
    settings = _with_heads(measure.settings_for(on, quick), heads)
    about = work.targets(on.arch.name, route or [], _numbers(head_dim), settings)
    file = out or work.default_out(on)
    planned = work.steps(about, settings)
    if dry_run:
        _show_plan(on, file, planned, work.Journal(file, on, settings), as_json)
        return
    began = time.perf_counter()
    try:
        with _out.progress("qualify", len(planned)) as step:
            records = work.qualify(
                on, about, settings, file, lambda s, result, known: step(_describe(s, result, known))
            )
    except KeyboardInterrupt:
        _out.note("what is finished is kept, run it again to go on")
        raise
    _show(records, file, time.perf_counter() - began, as_json)
    if not all(r.verdict.admitted for r in records):
        raise typer.Exit(FAILED)


def _open(name: str) -> Device:
    from hipfire_kernels.running import devices as runtime

    on = runtime.device(name)
    if name == "auto" and on.name == "host":
        raise refuse("no GPU opens here (hfk doctor says why); --device host qualifies the CPU")
    if not getattr(on, "has_time", True):
        raise refuse(f"--device {name} interprets machine code, and its times say nothing of a card")
    return on


def _with_heads(settings: Settings, heads: str | None) -> Settings:
    """The settings, with the heads that were asked for."""
    from hipfire_kernels.cli.explain import heads_of

    if heads is None:
        return settings
    n_heads, n_kv_heads = heads_of(heads)
    return replace(settings, n_heads=n_heads, n_kv_heads=n_kv_heads)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InputError(f"--head-dim is {text!r}; required: numbers with commas between, for example 128,256")
    return list(dict.fromkeys(int(part) for part in parts))


def _describe(step: Step, result: Result, known: bool) -> str:
    """A line of progress."""
    found = result["fault"]
    if not found:
        facts = {"parity": "{cases} cases, worst error {worst_error:.2e}", "timing": "{ratio:.2f}x, {route_us:.1f} us"}
        found = facts.get(step.kind, "clean").format(**result)
    return f"{step.describe()}: {found}{' (kept from before)' if known else ''}"


def _show_plan(on: Device, file: Path, planned: Sequence[Step], journal: Journal, as_json: bool) -> None:
    steps = [
        {
            "route": s.target.route,
            "head_dim": s.target.head_dim,
            "kind": s.kind,
            "ctx": s.ctx or None,
            "rows": s.rows or None,
            "finished": journal.get(s) is not None,
        }
        for s in planned
    ]
    if as_json:
        _out.document({"device": on.name, "arch": on.arch.name, "out": str(file), "steps": steps})
        return
    columns = ["route", "head_dim", "kind", "ctx", "rows", "finished"]
    rows = [["" if s[c] is None else "yes" if s[c] is True else s[c] or "" for c in columns] for s in steps]
    _out.table(columns, rows, numeric=["head_dim", "ctx", "rows"])
    print(f"\n{len(steps)} steps on {on.name} ({on.arch.name}); evidence would go to {file}")


def _show(records: Sequence[Evidence], file: Path, seconds: float, as_json: bool) -> None:
    if as_json:
        _out.document({"out": str(file), "seconds": round(seconds, 1), "records": [r.as_dict() for r in records]})
        return
    timed: list[list[Any]] = [
        [r.route, r.shape.head_dim, s.ctx, s.rows, f"{s.established_us:.1f}", f"{s.route_us:.1f}", *_ratio(s)]
        for r in records
        for s in r.speed
    ]
    columns = ["route", "head_dim", "ctx", "rows", "established us", "route us", "ratio", "quartiles"]
    _out.table(columns, timed, numeric=columns[1:])
    print()
    verdicts = [
        [
            r.route,
            r.shape.head_dim,
            r.parity.cases,
            "" if r.parity.worst_error is None else f"{r.parity.worst_error:.2e}",
            r.crossover.ctx if r.crossover else "",
            f"{r.crossover.below or 'none'} .. {r.crossover.above or 'none'}" if r.crossover else "",
            "admitted" if r.verdict.admitted else "NOT ADMITTED",
            r.verdict.why,
        ]
        for r in records
    ]
    _out.table(
        ["route", "head_dim", "cases", "worst error", "crossover", "measured around it", "verdict", "why"], verdicts
    )
    print(f"\n{records[0].device}, {records[0].arch}: evidence in {file} ({seconds:.0f} s)")


def _ratio(speed: Any) -> tuple[str, str]:
    low, high = speed.quartiles
    return f"{speed.ratio:.2f}x", f"{low:.2f} .. {high:.2f}"
