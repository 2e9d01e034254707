"""`hfk tune`: which values of a family's free choices are the fastest, measured on the device at hand.

A question is a class of shapes, and asks for some of the choices. Its candidates, the default first, are held against
the float64 oracle and against the default; those that are right are timed with the default in one interleaved run for
each shape of the class. A candidate wins where it is faster beyond doubt at one shape (`pairs.judge`) and slower
beyond doubt at none; of those that do, the one with the largest mean ratio. Where none does the default stays.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np

from hipfire_kernels import __version__
from hipfire_kernels.authoring.family import Site, Variant
from hipfire_kernels.bench import pairs
from hipfire_kernels.building.builder import build
from hipfire_kernels.building.processes import pool
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.parity import Case, expected, inputs
from hipfire_kernels.dispatch import evidence, measure, tuning
from hipfire_kernels.dispatch.measure import Settings, Track
from hipfire_kernels.dispatch.qualify import takes
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, Route
from hipfire_kernels.dispatch.tuning import ANY, Choice, Gain, Key, Tuning
from hipfire_kernels.errors import CompileError, DeviceError, HipfireError, InputError, RenderError
from hipfire_kernels.kernels import families
from hipfire_kernels.kernels.arguments import DRAFT
from hipfire_kernels.running.attention import PARTIALS_ROWS, check_verify, reducer, rows_at_once, verify_plan
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.draft import DraftWorkspace, draft_attend_rows

ROUNDS = 18
"""Pairs of each candidate: 17 of 18 that agree are a verdict."""

HELD_CTX = 777
"""Keys of the case that every candidate is held on: some splits have none, most have one or two steps."""


@dataclass(frozen=True)
class Shapes:
    """What is timed: every head_dim with all rows and contexts. `heads` are query and KV heads."""

    head_dims: tuple[int, ...]
    heads: tuple[int, int]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]


def shapes_for(device: Device, workload: str) -> Shapes:
    """What is timed by default: the shapes of a 27B target and of its draft; on the host, little ones."""
    if not isinstance(device, GpuDevice):
        return Shapes((128,), (6, 1), (4, 16), (512, 1024))
    contexts = (2048, 4096, 20672, 32768, 131072)
    if workload == "draft":
        return Shapes((128,), (32, 8), (16,), contexts)
    return Shapes((128, 256), (24, 4), (4, 16, 32), contexts)


Values = tuple[tuple[str, int], ...]
"""A candidate: name and value of each choice that is asked for."""


@dataclass(frozen=True)
class Point:
    """One shape, and the variant that its route takes by default."""

    variant: Variant
    rows: int
    ctx: int


@dataclass(frozen=True)
class Question:
    """Which values of `names` are the fastest at these points. `key` is that of the record which answers."""

    key: Key
    names: tuple[str, ...]
    points: tuple[Point, ...]


@dataclass
class Answer:
    """What came of a question.

    Attributes:
        record: of the winner; None for the default.
        means: of every candidate but the default that was right at every point, the mean ratio to the default.
        faults: what was wrong with candidates.
    """

    question: Question
    record: Tuning | None = None
    means: dict[Values, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def tunable(names: Sequence[str]) -> list[Route]:
    """The routes whose families have free choices.

    Args:
        names: of families; all when empty.

    Raises:
        InputError: a family is unknown, or has none.
    """
    legal = {row.family: row for row in ROUTES if tuning.names(row.family)}
    for name in names:
        if name not in legal:
            raise InputError(f"family {name!r} has no choices to tune; those that do: {', '.join(legal)}")
    return [legal[name] for name in names or legal]


def questions(row: Route, device: Device, shapes: Shapes) -> list[Question]:
    """What is asked about a route's family, head_dim by head_dim. Splits of an exact family first, for all points.

    Where there is but one value worth timing nothing is asked.
    """
    arch, family, names = device.arch.name, families()[row.family], tuning.names(row.family)
    found = []
    for head_dim in shapes.head_dims:
        points: dict[tuple[int, int], list[Point]] = {}
        for ctx, rows in itertools.product(shapes.contexts, shapes.rows):
            at = tuning.classes(rows, ctx)
            if at is not None:
                points.setdefault(at, []).extend(_points(row, arch, shapes.heads, head_dim, rows, ctx))
        everywhere = tuple(itertools.chain.from_iterable(points.values()))
        if not everywhere:
            continue
        about = (arch, row.family, head_dim, *shapes.heads)
        if family.exact:
            found.append(Question((*about, ANY, ANY), ("splits",), everywhere))
        asked = tuple(name for name in names if not (family.exact and name == "splits"))
        if asked:
            found += [Question((*about, *at), asked, tuple(inside)) for at, inside in points.items()]
    return [question for question in found if len(candidates(question, device, {})) > 1]


def _points(row: Route, arch: str, heads: tuple[int, int], head_dim: int, rows: int, ctx: int) -> Iterator[Point]:
    """The variants that serve a shape: one, for a draft one for each format of K and V."""
    for kv_format in ("f32", "f16") if row.workload == "draft" else ("q8_0",):
        request = AttendRequest(
            arch, row.workload, kv_format, head_dim, *heads, rows, ctx, "chain", capturing=False, recording=False
        )
        if takes(row, request):
            yield Point(row.variant(request), rows, ctx)


def candidates(question: Question, device: Device, base: Mapping[str, int]) -> list[Values]:
    """The values worth timing, the default first; what is not asked for is as in `base`."""
    point = question.points[0]
    site = Site(device.multiprocessors, question.key[4], min(point.rows, rows_at_once(point.variant, PARTIALS_ROWS)))
    default = Choice(base, "").of(point.variant)
    params = [name for name in question.names if name != "splits"]
    found: list[Values] = []
    for values in itertools.product(*(default.family.space(default, site)[name] for name in params)):
        chosen = tuple(zip(params, values, strict=True))
        variant = Choice(dict(chosen), "").of(default)
        if not variant.fits(device.arch.name):
            continue
        splits = variant.family.space(variant, site)["splits"] if "splits" in question.names else ()
        found += [(*chosen, ("splits", n)) for n in splits] if splits else [chosen]
    return found


# ---- whether a candidate is right -----------------------------------------------------------------------------------


def in_words(device: Device, check: Callable[[], str]) -> str:
    """What a check of a candidate says, or what keeps it from being checked.

    Raises:
        DeviceError: the device does no work any more.
    """
    try:
        return check()
    except (CompileError, RenderError) as error:
        return f"does not build: {error}"
    except DeviceError as error:
        measure.require_alive(device, error)
        return str(error)


class Held:
    """Holds candidates against the float64 oracle, each once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[Variant, int | None, int, int], str] = {}

    def fault(self, variant: Variant, splits: int | None, rows: int, group: int) -> str:
        """What is wrong with a variant at a number of splits; empty when there is nothing."""
        key = (variant, splits, rows, group)
        if key not in self._known:
            case = Case(rows, HELD_CTX, group, 1, variant.head_dim, seed=rows)
            self._known[key] = in_words(self._device, lambda: self._fault(variant, splits, case))
        return self._known[key]

    def _fault(self, variant: Variant, splits: int | None, case: Case) -> str:
        run = self._draft if variant.family.oracle == DRAFT else self._verify
        error, limit = run(variant, splits, case), variant.tolerance.worst_row
        return "" if error <= limit else f"error {error:.3g}, limit {limit:g}"

    def _verify(self, variant: Variant, splits: int | None, case: Case) -> float:
        on, i = self._device, inputs(case)
        q, k, v, positions = (on.to_device(a) for a in (i.q, i.k_cache, i.v_cache, i.positions))
        out = on.to_device(np.full(i.q.shape, np.nan, np.float32))
        verify_plan(variant, on, check_verify(on, q, k, v), case.ctx, splits=splits).run(q, k, v, positions, out)
        return worst_row(on.to_host(out), expected(case))

    def _draft(self, variant: Variant, splits: int | None, case: Case) -> float:
        on, rng = self._device, np.random.default_rng(case.seed)
        q = rng.standard_normal((case.rows, case.n_heads, case.head_dim), np.float32)
        dtype = np.float16 if variant.kv == "f16" else np.float32
        shape = (case.ctx, case.n_kv_heads, case.head_dim)
        k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
        out = on.to_device(np.full(q.shape, np.nan, np.float32))
        arrays = (*(on.to_device(a) for a in (q, k, v)), out)
        draft_attend_rows(on, *arrays, variant=variant, workspace=DraftWorkspace(splits))
        return worst_row(on.to_host(out), reference.draft_attend(q, k, v))


# ---- how fast it is -------------------------------------------------------------------------------------------------

Timing = tuple[tuple[float, ...], float, float]
"""Of a candidate at a point: default over candidate pair by pair, median us of the default and of the candidate."""


def time_point(
    track: Track, point: Point, arms: Mapping[Values, tuple[Variant, int | None]], faults: list[str]
) -> dict[Values, Timing]:
    """Time candidates beside the first, the default, in one interleaved run. One that differs from it is a fault."""
    on = track.device
    rng = np.random.default_rng(point.ctx + point.rows)
    shape = (point.rows, track.settings.n_heads, point.variant.head_dim)
    q = on.to_device(rng.standard_normal(shape, np.float32))
    outs = [on.to_device(np.full(shape, np.nan, np.float32)) for _ in arms]
    calls = {
        str(i): track.call(variant, q, outs[i], point.ctx, splits) for i, (variant, splits) in enumerate(arms.values())
    }
    times = track.timer.interleaved(calls, track.settings.rounds, warmup=2)
    base, want = times["0"], on.to_host(outs[0]).astype(np.float64)
    found: dict[Values, Timing] = {}
    for i, (values, (variant, _)) in enumerate(arms.items()):
        apart, limit = worst_row(on.to_host(outs[i]), want), 2 * variant.tolerance.worst_row
        if not apart <= limit:
            where = f"at {point.rows} rows, {point.ctx} keys"
            faults.append(f"{variant.entry}, {dict(values)}: {apart:.3g} from the default {where}")
            continue
        ratios = tuple(a / b for a, b in zip(base.samples, times[str(i)].samples, strict=True))
        found[values] = (ratios, base.median, times[str(i)].median)
    return found


def mean_ratios(timed: Sequence[Mapping[Values, Timing]]) -> dict[Values, float]:
    """Geometric mean over the points of default over candidate, for those timed at all of them; not for the default."""
    _, *others = timed[0]
    return {
        values: math.prod(float(np.median(point[values][0])) for point in timed) ** (1 / len(timed))
        for values in others
        if all(values in point for point in timed)
    }


def winner(
    timed: Sequence[Mapping[Values, Timing]], means: Mapping[Values, float]
) -> tuple[Values, list[pairs.Judgement]] | None:
    """The candidate that wins, and what its pairs say at each point; None for the default."""
    for values in sorted(means, key=lambda values: means[values], reverse=True):
        if means[values] <= 1:
            return None
        said = [pairs.judge(point[values][0]) for point in timed]
        verdicts = {judgement.verdict for judgement in said}
        if "on is faster" in verdicts and "off is faster" not in verdicts:
            return values, said
    return None


# ---- a run ----------------------------------------------------------------------------------------------------------

OnPoint = Callable[[str], None]


def tune(device: Device, asked: Sequence[Question], step: OnPoint) -> list[Answer]:
    """Answer questions, those of one head_dim together, whose keys and values are made once. Writes nothing.

    Args:
        step: called after each point that was timed, with its description.
    """
    _build_ahead(asked, device)
    held, found = Held(device), []
    base: dict[tuple[Any, ...], dict[str, int]] = {}
    for heads, alike in itertools.groupby(sorted(asked, key=_heads_and_dim), lambda question: question.key[3:5]):
        together = list(alike)
        contexts = {point.ctx for question in together for point in question.points}
        track = Track(device, Settings(tuple(contexts), ROUNDS, *heads))
        for question in together:
            about = question.key[:5]
            answer = _answer(question, track, held, base.get(about, {}), step)
            if answer.record and question.key[5:] == (ANY, ANY):
                base[about] = answer.record.choice
            found.append(answer)
    return found


def _heads_and_dim(question: Question) -> tuple[int, ...]:
    _, _, head_dim, n_heads, n_kv_heads, *_ = question.key
    return (n_heads, n_kv_heads, head_dim)


def _build_ahead(asked: Sequence[Question], device: Device) -> None:
    """Build every candidate, several at once. What does not build is found out about when it is held."""
    variants = dict.fromkeys(
        Choice(dict(values), "").of(point.variant)
        for question in asked
        for values in candidates(question, device, {})
        for point in question.points
    )

    def one(variant: Variant) -> None:
        with contextlib.suppress(HipfireError):
            build(variant, device.arch.name, device.toolchain)

    with pool() as threads:
        list(threads.map(one, variants))


def _answer(question: Question, track: Track, held: Held, base: Mapping[str, int], step: OnPoint) -> Answer:
    answer, device = Answer(question), track.device
    listed = candidates(question, device, base)
    timed: list[dict[Values, Timing]] = []
    kernels: dict[Variant, None] = {}
    for point in question.points:
        arms = {}
        for values in listed:
            choice = Choice({**base, **dict(values)}, "")
            variant = choice.of(point.variant)
            fault = held.fault(variant, choice.splits, point.rows, question.key[3] // question.key[4])
            if not fault:
                arms[values] = (variant, choice.splits)
            elif values == listed[0]:
                raise HipfireError(f"the default {variant.entry} is wrong ({fault}): nothing can be tuned; hfk parity")
            else:
                answer.faults.append(f"{variant.entry}, {dict(values)}: {fault}")
        kernels.update(dict.fromkeys(variant for variant, _ in arms.values()))
        timed.append(time_point(track, point, arms, answer.faults))
        step(f"{point.variant.family.name} d{point.variant.head_dim} B{point.rows} ctx {point.ctx}")
    answer.faults = list(dict.fromkeys(answer.faults))
    answer.means = mean_ratios(timed)
    won = winner(timed, answer.means)
    if won is not None:
        answer.record = _record(question, *won, timed, kernels, device)
    return answer


def _record(
    question: Question,
    values: Values,
    said: Sequence[pairs.Judgement],
    timed: Sequence[Mapping[Values, Timing]],
    kernels: Mapping[Variant, None],
    device: Device,
) -> Tuning:
    arch, family, head_dim, n_heads, n_kv_heads, rows, ctx = question.key
    gains = [
        Gain(
            p.rows,
            p.ctx,
            round(timing[values][1], 3),
            round(timing[values][2], 3),
            round(j.ratio, 4),
            (round(j.interval[0], 4), round(j.interval[1], 4)),
        )
        for p, timing, j in zip(question.points, timed, said, strict=True)
    ]
    mergers = dict.fromkeys(merging for v in kernels if (merging := reducer(v)) is not None)
    return Tuning(
        arch=arch,
        **measure.identity(device),
        date=date.today().isoformat(),
        multiprocessors=device.multiprocessors,
        family=family,
        head_dim=head_dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        rows=rows,
        ctx=ctx,
        choice=dict(values),
        gains=tuple(gains),
        digests={v.entry: evidence.source_digest(v.entry, arch) or "" for v in (*kernels, *mergers)},
        source=f"hfk tune of hipfire-kernels {__version__}",
    )
