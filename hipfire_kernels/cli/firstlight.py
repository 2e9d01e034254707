"""`hfk firstlight`: what is run first on a card that nothing of this library has run on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hipfire_kernels.cli import _choices, _out
from hipfire_kernels.cli._errors import FAILED, REFUSED

if TYPE_CHECKING:
    from hipfire_kernels.bench.firstlight.runner import Runner
    from hipfire_kernels.bench.firstlight.steps import Step
    from hipfire_kernels.dispatch.runfolder import Asked, Result


def firstlight(
    device: Annotated[
        str, _choices.option(_choices.cards, metavar="DEVICE", help="hip:N, cuda:N, or isa:ARCH to see what it does.")
    ] = "hip:0",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where all of it is written. [default: firstlight-DEVICE]")
    ] = None,
    again: Annotated[
        list[str] | None, typer.Option(metavar="STEP", help="Run a step anew, whatever became of it; may be repeated.")
    ] = None,
    until: Annotated[str, typer.Option(metavar="STEP", help="The last step to run. [default: all]")] = "",
    family: Annotated[
        list[str] | None,
        _choices.option(_choices.families, metavar="FAMILY", help="A kernel family; may be repeated. [default: all]"),
    ] = None,
    few: Annotated[
        bool | None,
        typer.Option("--few/--full", help="One variant of each family, few cases. [default: on isa: devices]"),
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", show_default=False, help="Silence that is a hang. [default: each step's own]"
        ),
    ] = 0.0,
    as_json: _out.Json = False,
) -> None:
    """Look at a new card step by step, each in a process of its own, made for the case that things are wrong.

    Run again it goes on where it was, also after a hang or a reset; a step that took the machine with it is not run
    again unless --again asks for it. Exit code 0: all is as it should be; 1: something is not; 3: no such device.
    """
    from hipfire_kernels.bench.firstlight.runner import Runner
    from hipfire_kernels.dispatch.runfolder import PAGE, Folder

    folder = Folder(out or Path(f"firstlight-{device.replace(':', '-')}"))
    folder.make(_asked(device, few, family))
    tell = _out.note if as_json else _print
    runner = Runner(
        folder,
        lambda step: tell(f"{step.name}: {step.title} ..."),
        lambda step, result, known: tell(_told(step, result, known)),
        limit,
    )
    try:
        stopped = runner.run(until=until, again=again or ())
    except KeyboardInterrupt:
        _out.note("what is finished is kept, run it again to go on")
        raise
    _out.save(folder.path / PAGE, _page(runner, stopped))
    summary = runner.summary()
    if as_json:
        _out.document({**summary, "stopped": stopped, "folder": str(folder.path)})
    else:
        _end(runner, stopped, folder.path)
    if not runner.opened():
        raise typer.Exit(REFUSED)
    if not summary["good"] or stopped:
        raise typer.Exit(FAILED)


def _asked(device: str, few: bool | None, family: list[str] | None) -> Asked:
    from hipfire_kernels import __version__
    from hipfire_kernels.bench.firstlight import steps
    from hipfire_kernels.dispatch.runfolder import Asked
    from hipfire_kernels.kernels import families

    interpreted = device.startswith("isa:")
    return Asked(
        device,
        interpreted if few is None else few,
        steps.in_order(family or list(families())),
        __version__,
        steps.templates_digest(),
    )


def _print(line: str) -> None:
    print(line, flush=True)


def _page(runner: Runner, stopped: str) -> str:
    from hipfire_kernels.bench.firstlight.page import page

    done = runner.results()
    finished = {step.name for step, _ in done}
    return page(runner.summary(), done, [step for step in runner.plan if step.name not in finished], stopped)


def _end(runner: Runner, stopped: str, folder: Path) -> None:
    states = [result.state for _, result in runner.results()]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    left = len(runner.plan) - len(states)
    print(f"\n{counted}{f'; {left} not run yet' if left else ''}. All of it is in {folder}, a page in index.html.")
    if stopped:
        print(stopped)


def _told(step: Step, result: Result, known: bool) -> str:
    """What became of a step, and what was found."""
    before = " (from before)" if known else f" ({result.seconds:.1f} s)"
    found = (line.replace("\n", "\n    ") for line in result.found)
    return "\n    ".join([f"{step.name}: {result.state}{before}", *found])
