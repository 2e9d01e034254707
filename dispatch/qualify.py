"""Earn evidence for the routes that need some, on the device at hand.

A run is a list of steps. What a step found is kept in a journal beside the output, under a digest of everything it
depends on (device, driver, compiler, rendered sources, settings): a run that was interrupted goes on where it was,
and a kernel that has changed since is measured anew. A route that is wrong anywhere, takes scratch memory, or is not
faster beyond noise is recorded as not admitted, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from hipfire_kernels import __version__
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.storage import evidence_root, replacing
from hipfire_kernels.dispatch import evidence, measure
from hipfire_kernels.dispatch.measure import Settings, Track
from hipfire_kernels.dispatch.record import Crossover, Evidence, Key, Parity, Shape, Speed, Verdict, dump, record_key
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, Route, routes_of
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running.attention import check_heads, reducer
from hipfire_kernels.running.devices.protocol import Device

HEAD_DIMS = (128, 256)

Result = dict[str, Any]
OnStep = Callable[["Step", Result, bool], None]
"""Called with a step, what it found, and whether that was in the journal."""


@dataclass(frozen=True)
class Target:
    """A route at a head_dim on an arch, and the kernels that are held and timed for it.

    Attributes:
        request: what is timed, with the least of the timed rows.
        variant: the one that such a request takes.
        others: what the route may also choose, by rows, K/V format, window or mask: held against the oracle.
        reducer: the second launch of a route that leaves records.
        established: the route's rival.
    """

    arch: str
    route: str
    head_dim: int
    request: AttendRequest
    variant: Variant
    others: tuple[Variant, ...]
    reducer: Variant | None
    established: Variant

    @property
    def key(self) -> Key:
        """That of the record that comes of it."""
        return record_key(self.arch, self.route, self.head_dim, self.request.group or 0)

    def at(self, rows: int) -> Variant:
        """What is timed with this many rows."""
        return route_named(self.route).variant(replace(self.request, rows=rows))

    def kernels(self) -> tuple[Variant, ...]:
        """What calls of the route launch."""
        return (self.variant, *self.others, *(() if self.reducer is None else (self.reducer,)))

    def rivals(self) -> tuple[Variant, ...]:
        """What calls of the established route launch."""
        merging = reducer(self.established)
        return (self.established, *(() if merging is None else (merging,)))


@dataclass(frozen=True)
class Step:
    """One measurement: "resources", "parity", or "timing" at a context and a number of rows."""

    kind: str
    target: Target
    ctx: int = 0
    rows: int = 0

    def describe(self) -> str:
        """Short and complete."""
        at = f" ctx {self.ctx} B{self.rows}" if self.kind == "timing" else ""
        return f"{self.target.route} d{self.target.head_dim} {self.kind}{at}"

    def kernels(self) -> tuple[Variant, ...]:
        """What the result depends on."""
        t = self.target
        return (*t.kernels(), *t.rivals()) if self.kind == "timing" else t.kernels()


def targets(arch: str, routes: Sequence[str], head_dims: Sequence[int], settings: Settings) -> list[Target]:
    """What a run is about.

    Args:
        routes: names; all that need evidence when empty.

    Raises:
        InputError: a route is unknown or needs no evidence, or takes none of the head_dims with these heads; the heads
            are none.
    """
    for head_dim in head_dims:
        check_heads(1, settings.n_heads, settings.n_kv_heads, head_dim)
    known = [row for row in ROUTES if row.needs_evidence]
    chosen = [route_named(name) for name in routes] or known
    found: list[Target] = []
    for row in chosen:
        if row not in known:
            raise InputError(f"route {row.name} needs no evidence; those that do: {', '.join(r.name for r in known)}")
        legal = [target for d in head_dims if (target := _target(arch, row, d, settings)) is not None]
        if not legal and routes:
            raise InputError(
                f"route {row.name} has no kernel for head_dim {', '.join(map(str, head_dims))} with "
                f"{settings.n_heads}/{settings.n_kv_heads} heads"
            )
        found += legal
    return found


def _target(arch: str, row: Route, head_dim: int, settings: Settings) -> Target | None:
    request = AttendRequest(
        arch=arch,
        workload=row.workload,
        kv_format="q8_0" if row.workload == "verify" else "f32",
        head_dim=head_dim,
        n_heads=settings.n_heads,
        n_kv_heads=settings.n_kv_heads,
        rows=row.timed_rows[0],
        logical_ctx=max(settings.contexts),
        layout="chain",
        capturing=False,
        recording=False,
    )
    if not takes(row, request):
        return None
    established = routes_of(row.workload)[-1].variant(request)
    variant = row.variant(request)
    formats = itertools.product(row.timed_rows, (request.kv_format, "f16"), (0, 512))
    similar = [replace(request, rows=b, kv_format=kv, window=w) for b, kv, w in formats]
    chosen = dict.fromkeys(row.variant(other) for other in similar if takes(row, other))
    others = tuple(other for other in chosen if other != variant)
    return Target(arch, row.name, head_dim, request, variant, others, reducer(variant), established)


def takes(row: Route, request: AttendRequest) -> bool:
    """Whether a route has a kernel for a request, be it open or not."""
    return all(predicate(request).ok for predicate in row.predicates)


def steps(about: Sequence[Target], settings: Settings) -> list[Step]:
    """The steps of a run: for each target what it takes, then whether it is right, then how fast it is."""
    found = []
    for target in about:
        found += [Step("resources", target), Step("parity", target)]
        rows = route_named(target.route).timed_rows
        found += [Step("timing", target, ctx, b) for ctx in settings.contexts for b in rows]
    return found


# ---- the journal ----------------------------------------------------------------------------------------------------


class Journal:
    """Results of finished steps, one JSON line each."""

    def __init__(self, out: Path, device: Device, settings: Settings) -> None:
        self.path = out.with_name(out.name + ".progress.jsonl")
        self._bound_to = {**measure.identity(device), "version": __version__, **dataclasses.asdict(settings)}
        self._found = self._read()

    def _read(self) -> dict[str, Result]:
        """A line that is cut off belongs to a step that is not finished."""
        found: dict[str, Result] = {}
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    found[entry["key"]] = entry["result"]
        return found

    def key(self, step: Step) -> str:
        """Digest of the step and of all that its result depends on."""
        sources = {v.entry: evidence.source_digest(v.entry, step.target.arch) for v in step.kernels()}
        text = json.dumps([self._bound_to, step.target.arch, step.describe(), sources], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, step: Step) -> Result | None:
        """What the step found, if it is finished."""
        return self._found.get(self.key(step))

    def add(self, step: Step, result: Result) -> None:
        """Keep what a step found, on disk before the next one starts."""
        line = json.dumps({"key": self.key(step), "step": step.describe(), "result": result}, allow_nan=False)
        with self.path.open("ab") as file:
            # A newline first: the last line may have been cut off.
            file.write(b"\n" + line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._found[self.key(step)] = result

    def end(self) -> None:
        """The run is over, its evidence written."""
        self.path.unlink(missing_ok=True)


# ---- a run ----------------------------------------------------------------------------------------------------------


def default_out(device: Device) -> Path:
    """The file of the user's evidence folder for this device's arch."""
    return evidence_root() / f"{device.arch.name}.json"


def qualify(device: Device, about: Sequence[Target], settings: Settings, out: Path, on_step: OnStep) -> list[Evidence]:
    """Measure, and write the evidence.

    Args:
        out: the evidence file; its records of other archs, routes and head_dims stay.
        on_step: called after each step.

    Returns:
        A record for each target, admitted or not.

    Raises:
        DeviceError: the device does no work any more. The step is noted as failed: run again for the others.
        InputError: `out` exists and is no evidence file, or cannot be written.
    """
    kept = _other_records(out, about)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(out, device, settings)
        track = Track(device, settings)
        found = [_record(t, _measure(t, track, journal, on_step), device, settings) for t in about]
        with replacing(out) as file:
            file.write(dump([*kept, *found]).encode())
        journal.end()
    except OSError as error:
        raise InputError(f"{out} and its journal cannot be written ({error.strerror}); pass --out") from error
    evidence.forget()
    return found


def _other_records(out: Path, about: Sequence[Target]) -> list[Evidence]:
    """What is in the file already and stays there."""
    replaced = {t.key for t in about}
    return [r for r in (evidence.read_file(out) if out.exists() else ()) if r.key not in replaced]


def _measure(target: Target, track: Track, journal: Journal, on_step: OnStep) -> list[tuple[Step, Result]]:
    """All steps of a target, up to one that settles that it is not admitted; a wrong kernel is not timed."""
    done: list[tuple[Step, Result]] = []
    for step in steps([target], track.settings):
        result = journal.get(step)
        known = result is not None
        if result is None:
            try:
                result = _run(step, track)
            except DeviceError as error:
                journal.add(step, {"fault": f"the device did no work any more after: {error}"})
                raise DeviceError(f"{step.describe()}: {error}. Noted; run it again to go on with the rest") from error
            journal.add(step, result)
        done.append((step, result))
        on_step(step, result, known)
        if result["fault"]:
            break
    return done


def _run(step: Step, track: Track) -> Result:
    t = step.target
    if step.kind == "resources":
        return measure.resources(t.kernels(), track.device)
    if step.kind == "parity":
        return measure.parity((t.variant, *t.others), track.device, track.settings)
    try:
        return track.time(t.at(step.rows), t.established, step.ctx, step.rows)
    except DeviceError as error:
        measure.require_alive(track.device, error)
        return {"fault": f"ctx {step.ctx}, {step.rows} rows: {error}"}


# ---- what it comes to -----------------------------------------------------------------------------------------------


def crossover(speed: Sequence[Speed]) -> Crossover | None:
    """The smallest context from which on the lower quartile of every ratio is above 1."""
    contexts = sorted({s.ctx for s in speed})
    faster = [all(s.quartiles is not None and s.quartiles[0] > 1 for s in speed if s.ctx == c) for c in contexts]
    first = len(contexts)
    while first and faster[first - 1]:
        first -= 1
    if first == len(contexts):
        return None
    around = [None, *contexts, None]
    return Crossover(contexts[first], around[first], around[first + 2])


def _record(target: Target, results: Sequence[tuple[Step, Result]], device: Device, settings: Settings) -> Evidence:
    by_kind = {step.kind: result for step, result in results if step.kind != "timing"}
    held = by_kind.get("parity", {"fault": "not held"})
    speed = tuple(
        Speed(s.ctx, s.rows, r["route_us"], r["established_us"], r["ratio"], tuple(r["quartiles"]), None)
        for s, r in results
        if s.kind == "timing" and "ratio" in r
    )
    fault = next((f"{step.kind}: {result['fault']}" for step, result in results if result["fault"]), "")
    crossing = None if fault else crossover(speed)
    kernels = (*target.kernels(), *target.rivals())
    digests = {v.entry: evidence.source_digest(v.entry, target.arch) for v in kernels}
    return Evidence(
        arch=target.arch,
        **measure.identity(device),
        date=date.today().isoformat(),
        route=target.route,
        kind="measured",
        shape=Shape(
            target.head_dim, settings.n_heads, settings.n_kv_heads, tuple(sorted({s.rows or 0 for s in speed}))
        ),
        parity=Parity(
            held.get("cases"),
            held.get("worst_error"),
            held.get("limit", target.variant.tolerance.worst_row),  # where no case ran
            not held["fault"],
        ),
        speed=speed,
        crossover=crossing,
        digests={entry: digest or "" for entry, digest in digests.items()},
        verdict=_verdict(fault, crossing, speed, target.established),
        source=f"hfk qualify of hipfire-kernels {__version__}",
    )


def _verdict(fault: str, crossing: Crossover | None, speed: Sequence[Speed], established: Variant) -> Verdict:
    if fault:
        return Verdict(False, fault)
    if crossing is None:
        last = [s for s in speed if s.ctx == max(t.ctx for t in speed)]
        slowest = min(last, key=lambda s: s.quartiles[0] if s.quartiles else s.ratio)
        low, high = slowest.quartiles or (slowest.ratio, slowest.ratio)
        return Verdict(
            False,
            f"not faster than {established.entry} beyond noise: {slowest.ratio:.2f}x ({low:.2f} .. {high:.2f}) at "
            f"ctx {slowest.ctx}, {slowest.rows} rows",
        )
    ratios = [s.ratio for s in speed if s.ctx >= crossing.ctx]
    return Verdict(True, f"{min(ratios):.2f}x to {max(ratios):.2f}x from {crossing.ctx} keys on")
