"""`hfk watch`: what each save of a template did, within a second or two."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.resources import LABELS
from hipfire_kernels.cli import _choices, _select
from hipfire_kernels.cli.kernels import check_archs
from hipfire_kernels.errors import InputError


def watch(
    names: Annotated[list[str], typer.Argument(metavar="FAMILY|VARIANT", help="Families, or entry names.")],
    arch: Annotated[
        str, _choices.option(_choices.archs_or_all, listed=True, metavar="ARCH,...", help="The archs to build for.")
    ] = "gfx1100",
    time: Annotated[
        str | None,
        _choices.option(
            _choices.devices, metavar="DEVICE", help="Time each change against the last good version there."
        ),
    ] = None,
    on: Annotated[
        str,
        _choices.option(_choices.checked_devices, metavar="DEVICE", help="Where parity is checked."),
    ] = "host",
) -> None:
    """On each save of a template: source, resources against the last good version, parity, time.

    Of the variants that changed a few are built and run, which together have every line and every choice, though not
    every combination. Declarations (`kernels/`) are read once: start anew after editing those. Ends with Ctrl-C.
    """
    from hipfire_kernels.inspecting.watch import Watch, folders, saves, stamps
    from hipfire_kernels.running import devices as runtime

    archs = check_archs(arch, None)
    checked = runtime.arch_of(on)
    fitting = [[v for v in _select.many([n], everything=False) if _fits(v, [checked, *archs])] for n in names]
    if not any(fitting):
        where = "the host" if on == "host" else on
        raise InputError(f"no variant of {', '.join(names)} fits {where} and {arch}: their blocks have too little LDS")
    watched = Watch(fitting, archs, runtime.device(time) if time else None, on)
    places = folders(variant for variants in fitting for variant in variants)
    known = stamps(places)
    print(f"watching the templates of {', '.join(names)}", flush=True)
    _show(watched.turn(), [], on, first=True)
    for saved in saves(places, known):
        _show(watched.turn(), saved, on)


def _fits(variant: Variant, archs: list[str]) -> bool:
    return all(variant.fits(arch) for arch in archs)


def _show(turn: Any, saved: list[str], on: str, *, first: bool = False) -> None:
    if turn.diff:
        print(turn.diff)
    if turn.checked:
        print(f"checked  {', '.join(variant.name for variant in turn.checked)}")
    for variant, arch, message in turn.failures:
        print(f"FAILED   {arch} {variant.name}: {message}")
    by_kernel: dict[tuple[str, str], list[str]] = {}
    for variant, arch, change in turn.changes:
        text = f"{LABELS.get(change.field, change.field)} {change.before} -> {change.after}"
        by_kernel.setdefault((arch, variant.name), []).append(
            text if change.verdict == "changed" else f"{text} ({change.verdict})"
        )
    for (arch, name), texts in by_kernel.items():
        print(f"takes    {arch} {name}: {', '.join(texts)}")
    if turn.results:
        wrong = sum(not result.ok for result in turn.results)
        worst = max(result.error for result in turn.results)
        print(f"parity   {on}, {len(turn.results)} cases: {wrong or 'none'} wrong, worst error {worst:.2e}")
    for variant, times in turn.times.items():
        _show_time(variant, times)
    what = "ready" if first else f"saved {', '.join(saved)}"
    about = f"{len(turn.changed)} of the variants watched are new or changed" if turn.changed else "as it was when good"
    print(f"{'good' if turn.good else 'NOT GOOD':8} {what}: {about}; {turn.seconds:.2f} s\n", flush=True)


def _show_time(variant: Variant, times: dict[str, Any]) -> None:
    from hipfire_kernels.running.timing import ratio

    middle, low, high = ratio(times["before"], times["after"])
    print(
        f"time     {variant.name}: {times['before'].median:.1f} -> {times['after'].median:.1f} us, "
        f"{middle:.3f}x (quartiles {low:.3f} .. {high:.3f})"
    )
