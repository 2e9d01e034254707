"""`hfk fuzz` and `hfk replay`: find the input that breaks a kernel, and run it again."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out, _select
from hipfire_kernels.cli._errors import FAILED
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hipfire_kernels.testing.campaign import Settings
    from hipfire_kernels.testing.case import FuzzCase

LimitS = Annotated[
    float, typer.Option("--limit", min=1, help="CPU seconds a case may take, not counting compilation; then it hangs.")
]
Device = Annotated[str, _choices.option(_choices.devices, metavar="DEVICE", help="Where to run.")]


def fuzz(
    variants: _select.Variants = None,
    everything: _select.All = False,
    device: Device = "host",
    count: Annotated[int | None, typer.Option(min=0, help="Drawn cases. [default: 1000 without --seconds]")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="For how long, instead of or besides --count.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the campaign. [default: the time]")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. [default: the cores; at most 8 for a GPU]")
    ] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run part I of N; the seed must be the same.")] = "1/1",
    ray: Annotated[bool, typer.Option("--ray", help="Run the shards on the Ray cluster at hand; --shard 1/N.")] = False,
    limit: LimitS = 60,
    work: Annotated[int | None, typer.Option(min=1, help="Most rows x heads x keys x head_dim of a case.")] = None,
    failures: Annotated[int, typer.Option(min=1, help="Stop after so many failures.")] = 20,
    ledger: Annotated[Path | None, typer.Option(help="Known cases, run first. [default: those that ship]")] = None,
    out: Annotated[Path, _out.new_folder("Folder for failing cases.")] = Path("fuzz-failures"),
    merge: Annotated[list[Path] | None, typer.Option(help="Add up JSON results of shards; runs nothing.")] = None,
    as_json: _out.Json = False,
) -> None:
    """Hold variants against the oracle and the exact invariants on drawn cases. Exit code 1 if one fails.

    Known cases run first. A failing case is shrunk, written as a small JSON file, and run again by `hfk replay FILE`.
    """
    from hipfire_kernels.testing import campaign
    from hipfire_kernels.testing.axes import WORK
    from hipfire_kernels.testing.casefile import read_cases

    if merge:
        _report(campaign.merged([_read(file) for file in merge]), [], as_json)
        return
    index, shards = _shard(shard)
    if seed is None and shards > 1 and not ray:
        raise InputError(f"--shard {shard} without --seed; all shards of a campaign take the same one")
    settings = campaign.Settings(
        variants=tuple(_select.many(variants or [], everything=everything)),
        device=device,
        seed=int(time.time()) if seed is None else seed,
        count=1000 if count is None and seconds is None else count,
        seconds=seconds,
        jobs=jobs or (_cores() if device.startswith(("host", "isa:")) else min(8, _cores())),
        shard=index,
        shards=shards,
        limit_s=limit,
        work=work or WORK,
        most_failures=failures,
    )
    known = read_cases(ledger) if ledger else campaign.ledger()
    result = _run_on_ray(settings, known) if ray else campaign.run(settings, known, _progress()).as_dict()
    about = {
        "date": date.today().isoformat(),
        "seed": settings.seed,
        "shard": "all" if ray else shard,
        "device": device,
    }
    files = _written(result, out)
    _report({**about, **result}, files, as_json)


def _written(result: dict[str, Any], folder: Path) -> list[Path]:
    """The files of the failing cases; none, and a word about it, where they cannot be written: they are printed too."""
    from hipfire_kernels.testing import campaign

    try:
        return campaign.write_failures(campaign.failures_of(result), folder) if result["failures"] else []
    except OSError as error:
        _out.note(f"error: {folder} takes no failing cases ({error.strerror})")
        return []


def _run_on_ray(settings: Settings, known: list[FuzzCase]) -> dict[str, Any]:
    from hipfire_kernels.testing import campaign
    from hipfire_kernels.testing.ray_cluster import run_shards

    if settings.shard:
        raise InputError(f"--ray runs all shards; required: --shard 1/{settings.shards}")
    return campaign.merged(run_shards(settings, known))


def _progress() -> Callable[[str], None]:
    count = itertools.count(1)

    def progress(text: str) -> None:
        done = next(count)
        if text.startswith("FAILED"):
            _out.note(text)
        elif done % 500 == 0:
            _out.note(f"{done} cases")

    return progress


def _report(result: dict[str, Any], files: list[Path], as_json: bool) -> None:
    """Print a result, and end with exit code 1 if something failed."""
    if as_json:
        _out.document({**result, "files": [str(file) for file in files]})
    else:
        _print(result, files)
    if result["failures"]:
        raise typer.Exit(FAILED)


def _print(result: dict[str, Any], files: list[Path]) -> None:
    worst = sorted(((math.inf if w is None else w, name) for name, w in result["worst"].items()), reverse=True)
    column = "worst error / limit"
    _out.table(["variant", column], [[name, f"{error:.3f}"] for error, name in worst[:10]], numeric=[column])
    for failure in result["failures"]:
        shrunk = failure["shrunk"]
        error = math.inf if shrunk["error"] is None else shrunk["error"]
        print(f"\nFAILED {json.dumps(shrunk['case'])}")
        print(f"  error {error:.3g} (limit {shrunk['limit']:g}) {shrunk['fault']}".rstrip())
    device = result.get("device", "host")
    for file in files:
        print(f"hfk replay {file}" + ("" if device == "host" else f" --device {device}"))
    if result["left_out"]:
        print(f"\nleft out, for their LDS is not there: {', '.join(result['left_out'])}")
    about = [f"{name} {result[name]}" for name in ("seed", "shard", "device") if name in result]
    print(
        f"\n{len(result['worst'])} variants, {result['ledger']} known and {result['cases']} drawn cases in "
        f"{result['seconds']:.1f} s ({result['cases'] / max(result['seconds'], 1e-9):.0f} a second), "
        f"{len(result['failures'])} failures ({', '.join(about) or 'merged'})"
    )


def replay(
    file: Annotated[Path, typer.Argument(help="A case, or a file with one a line.")],
    device: Device = "host",
    limit: LimitS = 60,
    as_json: _out.Json = False,
) -> None:
    """Run the cases of a file again, in a process of their own. Exit code 1 if one fails."""
    from hipfire_kernels.testing.casefile import read_cases
    from hipfire_kernels.testing.children import Child

    cases = read_cases(file)
    if not cases:
        raise InputError(f"{file} holds no case")
    child = Child(device, None, limit)
    try:
        found = [child.run(case) for case in cases]
    finally:
        child.close()
    if as_json:
        _out.document({"device": device, "cases": [{**one.as_dict(), "ok": one.ok} for one in found]})
    else:
        for one in found:
            print(one.describe())
    if not all(one.ok for one in found):
        raise typer.Exit(FAILED)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shard(text: str) -> tuple[int, int]:
    """`2/3` as the index from 0 and the number."""
    part, slash, parts = text.partition("/")
    if not slash or not all(p.isascii() and p.isdecimal() for p in (part, parts)) or not 1 <= int(part) <= int(parts):
        raise InputError(f"--shard is {text!r}; required: I/N with I from 1 to N, for example 2/3")
    return int(part) - 1, int(parts)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--merge {file} cannot be read as JSON ({error})") from error
    return found
