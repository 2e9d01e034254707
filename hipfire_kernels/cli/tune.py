"""`hfk tune`: time the free choices of the kernel families on this device and keep those that win."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.cli._errors import FAILED, refuse
from hipfire_kernels.cli.bench import numbers
from hipfire_kernels.cli.explain import heads_of
from hipfire_kernels.errors import InputError

if TYPE_CHECKING:
    from hipfire_kernels.bench.tune import Answer
    from hipfire_kernels.bench.tune_cases import Contest
    from hipfire_kernels.dispatch.tuning import Tuning
    from hipfire_kernels.running.devices.protocol import Device


def _tunable() -> list[str]:
    """The families that have a choice."""
    from hipfire_kernels.bench import tune_cases
    from hipfire_kernels.bench.tune import tunable

    return [*(row.family for row in tunable([])), *tune_cases.tunable()]


def tune(
    device: Annotated[
        str, _choices.option(_choices.devices, metavar="DEVICE", help="auto: the first GPU. host: the CPU.")
    ] = "auto",
    family: Annotated[
        list[str] | None,
        _choices.option(_tunable, metavar="FAMILY", help="A family; may be repeated. [default: all with routes]"),
    ] = None,
    head_dim: Annotated[str | None, typer.Option(help="Comma-separated. [default: 128,256; host: 128]")] = None,
    heads: Annotated[str | None, typer.Option(help="Query/KV heads. [default: 24/4; draft: 32/8; host: 6/1]")] = None,
    rows: Annotated[str | None, typer.Option(help="Query rows. [default: 4,16,32; draft: 16; host: 4,16]")] = None,
    ctx: Annotated[
        str | None, typer.Option(help="Contexts. [default: 2048,4096,20672,32768,131072; host: 512,1024]")
    ] = None,
    extent: _choices.Extents = None,
    out: Annotated[Path | None, _out.new_file("[default: ARCH.json in the user's tuning folder]")] = None,
    as_json: _out.Json = False,
) -> None:
    """Time row groups and splits of the kernels that have a choice, beside their defaults, and store the winners.

    The decision of a request says which it has. A family that has a reference and no route is timed on cases of its
    declaration; what wins there is printed and not stored. Exit code 0: done; 1: a candidate is wrong; 3: no device.
    """
    from hipfire_kernels.bench import tune as work
    from hipfire_kernels.building.storage import tuning_root
    from hipfire_kernels.running import devices as runtime

    options = {"head_dims": ("--head-dim", head_dim), "rows": ("--rows", rows), "contexts": ("--ctx", ctx)}
    given: dict[str, Any] = {field: numbers(name, text) for field, (name, text) in options.items() if text}
    given |= {"heads": heads_of(heads)} if heads else {}
    on = runtime.device(device)
    if device == "auto" and on.name == "host":
        raise refuse("no GPU opens here (hfk doctor says why); --device host tunes the CPU")
    if family and (alone := _without_routes(family)):
        if given or out:
            raise InputError(f"{', '.join(alone)} has no route; --extent NAME=N sizes its case, and nothing is stored")
        return _tune_cases(alone, on, _choices.extents(extent), as_json)
    if extent:
        raise InputError("--extent is for families without a route; --rows, --ctx, --head-dim and --heads size these")
    chosen = work.tunable(family or [])
    about = [(row, replace(work.shapes_for(on, row.workload), **given)) for row in chosen]
    for _, shapes in about:
        if min(shapes.contexts) < max(shapes.rows):
            raise InputError(
                f"--ctx is {min(shapes.contexts)} with {max(shapes.rows)} rows; required: at least the rows"
            )
    file, began = out or tuning_root() / f"{on.arch.name}.json", time.perf_counter()
    kept = _other_records(file, ())  # a file that is not right is refused before the work
    asked = [q for row, shapes in about for q in work.questions(row, on, shapes)]
    if not asked:
        raise InputError("no kernel has these head_dims, heads and rows; `hfk list` shows what each family has")
    with _out.progress("tune", sum(len(q.points) for q in asked)) as step:
        answers = work.tune(on, asked, step)
    kept = _other_records(file, answers)
    _write(file, [*kept, *(a.record for a in answers if a.record)])
    _show(answers, file, time.perf_counter() - began, as_json)
    if any(a.faults for a in answers):
        raise typer.Exit(FAILED)


def _without_routes(names: Sequence[str]) -> list[str]:
    """The families of these that have no route: all, or none.

    Raises:
        InputError: some have.
    """
    from hipfire_kernels.bench import tune_cases

    found = [name for name in names if name in tune_cases.tunable()]
    if found and len(found) < len(names):
        raise InputError(f"{', '.join(found)} has no route and others have; tune them one after the other")
    return found


def _tune_cases(names: Sequence[str], on: Device, extents: Mapping[str, int], as_json: bool) -> None:
    """Time the choices of families without routes, and print what came of it."""
    from hipfire_kernels.bench import tune_cases as work
    from hipfire_kernels.kernels import families

    held = [contest for name in names for contest in work.contests(families()[name], on, extents)]
    with _out.progress("tune", len(held)) as step:
        for contest in held:
            work.run(contest, on, step)
    faults = [fault for contest in held for fault in contest.faults]
    if as_json:
        _out.document({"contests": [_contest(contest) for contest in held], "faults": faults})
    else:
        columns = ["default", "case", "candidate", "default us", "us", "ratio", "interval", "verdict"]
        lines = [line for contest in held for line in _rivals(contest)]
        _out.table(columns, lines, numeric=["default us", "us"])
        for fault in faults:
            print(f"WRONG {fault}")
        won = [contest.winner.variant.name for contest in held if contest.winner]
        print(f"\n{len(won)} of {len(held)} variants have a faster choice: {', '.join(won) or 'none'}")
        if won:
            print("nothing is stored: put the winner first in `space`, and launch it by its name")
    if faults:
        raise typer.Exit(FAILED)


def _contest(contest: Contest) -> dict[str, Any]:
    return {
        "default": contest.default.entry,
        "case": contest.case.as_dict(),
        "winner": contest.winner.variant.entry if contest.winner else None,
        "rivals": [
            {"entry": r.variant.entry, "default_us": r.default_us, "us": r.us, "judgement": r.judgement.as_dict()}
            for r in contest.rivals
        ],
    }


def _rivals(contest: Contest) -> list[list[Any]]:
    case = " ".join(f"{name}={n}" for name, n in contest.case.extents.items())
    return [
        [
            contest.default.name,
            case,
            rival.variant.name,
            f"{rival.default_us:.1f}",
            f"{rival.us:.1f}",
            f"{rival.judgement.ratio:.3f}x",
            f"{rival.judgement.interval[0]:.3f} .. {rival.judgement.interval[1]:.3f}",
            {"on is faster": "faster", "off is faster": "slower", None: "no verdict"}[rival.judgement.verdict],
        ]
        for rival in contest.rivals
    ]


def _other_records(file: Path, answers: Sequence[Answer]) -> list[Tuning]:
    """What is in the file already and was not asked anew."""
    from hipfire_kernels.dispatch import tuning

    asked = {a.question.key for a in answers}
    return [r for r in (tuning.read_file(file) if file.exists() else ()) if r.key not in asked]


def _write(file: Path, records: Sequence[Tuning]) -> None:
    from hipfire_kernels.building.storage import replacing
    from hipfire_kernels.dispatch import record, tuning

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as to:
            to.write(record.dump(records).encode())
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); pass --out") from error
    tuning.forget()


def _show(answers: Sequence[Answer], file: Path, seconds: float, as_json: bool) -> None:
    faults = [fault for a in answers for fault in a.faults]
    if as_json:
        _out.document(
            {
                "out": str(file),
                "seconds": round(seconds, 1),
                "records": [a.record.as_dict() for a in answers if a.record],
                "defaults": [{"key": list(a.question.key), "best_other": _best(a)} for a in answers if not a.record],
                "faults": faults,
            }
        )
        return
    columns = ["family", "head_dim", "for rows", "for ctx", "choice", "at", "default us", "us", "ratio", "interval"]
    _out.table(columns, [line for a in answers for line in _lines(a)], numeric=["head_dim", "default us", "us"])
    for fault in faults:
        print(f"WRONG {fault}")
    won = sum(a.record is not None for a in answers)
    print(f"\n{won} of {len(answers)} classes have a faster choice than the default; {file} ({seconds:.0f} s)")


def _words(choice: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


def _best(answer: Answer) -> dict[str, Any]:
    """The fastest candidate beside the default, by its mean ratio."""
    values = max(answer.means, key=lambda values: answer.means[values], default=())
    return {"choice": _words(dict(values)) or "none right", "ratio": answer.means.get(values, math.nan)}


def _lines(answer: Answer) -> list[list[Any]]:
    _, family, head_dim, _, _, rows, ctx = answer.question.key
    head = [family, head_dim, rows or "any", ctx or "any"]
    if answer.record is None:
        best = _best(answer)
        return [[*head, "default", f"next: {best['choice']}", "", "", f"{best['ratio']:.3f}x", ""]]
    choice = _words(answer.record.choice)
    return [
        [
            *head,
            choice,
            f"B{g.rows} ctx {g.ctx}",
            f"{g.default_us:.1f}",
            f"{g.chosen_us:.1f}",
            f"{g.ratio:.3f}x",
            f"{g.interval[0]:.3f} .. {g.interval[1]:.3f}",
        ]
        for g in answer.record.gains
    ]
