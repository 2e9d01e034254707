"""The steps that take times: evidence for the fast routes, and a short table. Of a card alone."""

from __future__ import annotations

from typing import Any

from hipfire_kernels.bench import kernels
from hipfire_kernels.bench.firstlight.steps import Job, Outcome
from hipfire_kernels.dispatch import measure, runfolder
from hipfire_kernels.dispatch import qualify as work
from hipfire_kernels.dispatch.qualify import Target
from hipfire_kernels.dispatch.routes import route
from hipfire_kernels.dispatch.runfolder import ABSENT, CARD, FAILED, PASSED
from hipfire_kernels.running.devices import ISA
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch

FEW = measure.Settings((256, 512), rounds=4, n_heads=4, n_kv_heads=1, parity_cases=2, parity_ctx=256, parity_long=0)
SHAPES = [kernels.Shape(ctx, rows, head_dim) for head_dim in (128, 256) for rows in (8, 16) for ctx in (2048, 20676)]
FEW_SHAPES = [kernels.Shape(256, 8, 128, 4, 1)]
ROUNDS = 12


def _no_times(job: Job) -> list[str]:
    """Why there are no times on this device."""
    if job.device.driver.vendor == ISA:
        return [
            f"no times here: {job.device.name} interprets machine code, and is no measure of how fast a card runs it"
        ]
    return []


def _warned(job: Job) -> list[str]:
    """What stands above times that are no card's."""
    machine = job.folder.result(runfolder.MACHINE)
    kind = machine.facts.get("device", {}).get("kind") if machine is not None else ""
    return [] if kind == CARD else [f"these are times of a {kind or 'device that is not known'}, and say nothing"]


def _few(job: Job) -> None:
    """In a run of few, read less between the timed calls: enough for the cache, too little for a good time."""
    if job.asked.few:
        Stopwatch.FLUSH_BYTES = max(1 << 20, 2 * int(job.device.describe()["l2_bytes"]))


def _right(job: Job, families: set[str]) -> bool:
    """Whether all families that are looked at are right on their full grids. Those that are not looked at are not."""
    return all(job.passed(runfolder.grid(name)) for name in families)


# ---- qualify --------------------------------------------------------------------------------------------------------


def qualify(job: Job) -> Outcome:
    """Evidence for the routes whose kernels are right, as `hfk qualify` earns it; it goes on where it was."""
    if said := _no_times(job):
        return Outcome(ABSENT, said)
    _few(job)
    on = job.device
    settings = FEW if job.asked.few else measure.settings_for(on)
    every = work.targets(on.arch.name, [], (128,) if job.asked.few else work.HEAD_DIMS, settings)
    about = [target for target in every if _right(job, _families(target))]
    left = sorted({target.route for target in every} - {target.route for target in about})
    found = [f"{name} is not measured: a kernel of it is not right, or was not looked at" for name in left]
    if not about:
        return Outcome(ABSENT, found)
    file = job.folder.path / runfolder.EVIDENCE
    records = work.qualify(on, about, settings, file, lambda step, result, known: job.say(step.describe()))
    said = [
        f"{r.route} d{r.shape.head_dim}: {'opens' if r.verdict.admitted else 'stays closed'}, {r.verdict.why}"
        for r in records
    ]
    wrong = any(not r.parity.ok for r in records)
    return Outcome(FAILED if wrong else PASSED, _warned(job) + said + found, {"records": len(records)})


def _families(target: Target) -> set[str]:
    return {v.family.name for v in (*target.kernels(), *target.rivals())}


# ---- bench ----------------------------------------------------------------------------------------------------------


def bench(job: Job) -> Outcome:
    """A short table of the verify routes whose kernels are right."""
    if said := _no_times(job):
        return Outcome(ABSENT, said)
    _few(job)
    on = job.device
    names = [name for name in kernels.ROUTES if _right(job, {route(name).family})]
    rows = _table(job, on, names)
    found = _warned(job) + [kernels.describe(row) for row in rows]
    found += [f"{name} is left out: its kernels are not right, or were not looked at" for name in kernels.ROUTES
              if name not in names]  # fmt: skip
    return Outcome(PASSED, found, {"rows": rows})


def _table(job: Job, on: GpuDevice, names: list[str]) -> list[dict[str, Any]]:
    shapes = FEW_SHAPES if job.asked.few else SHAPES
    return kernels.table(on, shapes, 4 if job.asked.few else ROUNDS, step=job.say, routes=names)
