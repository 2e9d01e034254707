"""`hfk parity`: hold kernels against the float64 oracle."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipfire_kernels.cli import _choices, _out, _select
from hipfire_kernels.cli._errors import FAILED
from hipfire_kernels.errors import DeviceError, InputError

if TYPE_CHECKING:
    from hipfire_kernels.authoring.family import Variant
    from hipfire_kernels.running.devices.protocol import Device

_TWIN_LIMIT = 1e-6
"""How far a multi-row kernel may be from the established one, which does the same arithmetic row by row."""


@dataclass
class Report:
    """What a variant's cases gave.

    Attributes:
        worst: largest error against the oracle, in the unit of its check; `limit` is what that check allows.
        twin: largest difference to the established kernel, for a multi-row variant.
        failures: a line for each case that failed.
    """

    variant: Variant
    cases: int = 0
    worst: float = 0.0
    limit: float | None = None
    twin: float | None = None
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "variant": self.variant.name, "family": self.variant.family.name}


def parity(
    variants: _select.Variants = None,
    everything: _select.All = False,
    device: Annotated[str, _choices.option(_choices.devices, metavar="DEVICE", help="Where to run.")] = "host",
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the grid.")] = False,
    thread_order: Annotated[
        int | None, typer.Option(metavar="SEED", help="Host, isa: run the threads of a block in a permuted order.")
    ] = None,
    as_json: _out.Json = False,
) -> None:
    """Hold variants against the float64 oracle. Exit code 1 if one fails."""
    chosen = _select.many(variants or [], everything=everything)
    on = _device(device, thread_order)
    with _out.compiling():
        reports = _survey_all(chosen, on, quick)
    if as_json:
        _out.document({"device": on.name, "variants": [r.as_dict() for r in reports]})
    else:
        _print(reports)
    if any(r.failures for r in reports):
        raise typer.Exit(FAILED)


def _device(name: str, thread_order: int | None) -> Device:
    from hipfire_kernels.running import devices as runtime
    from hipfire_kernels.running.devices.host import HostDevice
    from hipfire_kernels.running.devices.protocol import Ordered

    if thread_order is None:
        return runtime.device(name)
    if name == "host":
        return HostDevice(thread_order=thread_order)
    found = runtime.device(name)
    if name.startswith("host") or not isinstance(found, Ordered):
        raise InputError(f"--thread-order with --device {name}; only the host and isa: devices can permute threads")
    found.thread_order = thread_order
    return found


def _survey_all(variants: list[Variant], device: Device, quick: bool) -> list[Report]:
    """Survey as many variants at a time as there are cores: one's oracle runs beside another's kernel."""
    from threadpoolctl import threadpool_limits

    from hipfire_kernels.building.processes import pool
    from hipfire_kernels.checking.oracle import oracle_of
    from hipfire_kernels.running.binding import kernel

    # A compiler or device that is missing is known before the threads start.
    kernel(variants[0], device)
    with (
        threadpool_limits(1),  # BLAS threads that spin would fight those that run kernel blocks
        pool() as threads,
        _out.progress("parity", len(variants)) as step,
    ):
        running = [threads.submit(survey, v, oracle_of(v).grid(v, quick=quick), device) for v in variants]
        for job in as_completed(running):
            step(job.result().variant.name)
    return [job.result() for job in running]


def survey(variant: Variant, cases: Iterable[Any], device: Device) -> Report:
    """Check a variant on cases. One that the device breaks off, say by a deadlock, ends the survey."""
    from hipfire_kernels.checking.result import named

    report = Report(variant)
    began = time.perf_counter()
    for case in cases:
        report.cases += 1
        try:
            _check(report, case, device)
        except DeviceError as error:
            report.worst = float("inf")
            report.failures.append(f"FAILED {named(variant.name, case)}: {error}")
            break
    report.seconds = time.perf_counter() - began
    return report


def _check(report: Report, case: Any, device: Device) -> None:
    from hipfire_kernels.checking.numbers import worst_row
    from hipfire_kernels.checking.oracle import check
    from hipfire_kernels.checking.parity import run_attend, tile_twin

    variant = report.variant
    result = check(variant, case, device)
    report.worst = max(report.worst, result.error)
    report.limit = result.limit
    if not result.ok:
        report.failures.append(result.describe())
    if variant.family.name == "attention_flash_q8_0_rows":
        got, _ = run_attend(variant, case, device)
        want, _ = run_attend(tile_twin(variant), case, device)
        apart = worst_row(got, want)
        report.twin = max(report.twin or 0.0, apart)
        if apart > _TWIN_LIMIT:
            report.failures.append(
                f"FAILED {variant.name} {case.describe()}: {apart:.3g} from {tile_twin(variant).name} "
                f"(limit {_TWIN_LIMIT:g})"
            )


def _print(reports: list[Report]) -> None:
    rows = [
        [
            r.variant.name,
            r.cases,
            f"{r.worst:.2e}",
            "" if r.limit is None else f"{r.limit:.0e}",
            "" if r.twin is None else f"{r.twin:.0e}",
            len(r.failures),
            f"{r.seconds:.1f}",
        ]
        for r in reports
    ]
    columns = ["variant", "cases", "worst error", "limit", "to tile_batched", "failed", "seconds"]
    _out.table(columns, rows, numeric=columns[1:])
    failures = [line for r in reports for line in r.failures]
    for line in failures:
        print(line)
    print(f"\n{len(reports)} variants, {sum(r.cases for r in reports)} cases, {len(failures)} failures")
