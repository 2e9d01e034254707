"""The parts of a report that are curves of kernels: speed-up, roofline, error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hipfire_kernels.bench.kernels import BASE, Shape
from hipfire_kernels.bench.report.parts import Cell, Rows, Section, Series, Table, grouped, number
from hipfire_kernels.bench.report.plots import Line, Plot, plain
from hipfire_kernels.bench.report.results import Document, Results
from hipfire_kernels.dispatch.qualify import crossover
from hipfire_kernels.dispatch.record import Evidence, Speed
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, route, routes_of
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES

BF16_OVER_Q8 = 2 * Q8_BLOCK / Q8_BYTES
"""Bytes of a 16-bit K or V over those in Q8_0."""

ROOFLINE_ROWS = 16

HEADS = "24/4"
"""Of rows that do not say."""


def _device(document: Document) -> str:
    return str(document.get("name") or document.get("device"))


def _heads(row: Mapping[str, Any]) -> tuple[int, int]:
    heads, kv_heads = str(row.get("heads", HEADS)).split("/")
    return int(heads), int(kv_heads)


def _by_shape(rows: Iterable[Mapping[str, Any]], *more: str) -> list[tuple[tuple[Any, ...], Rows]]:
    """Rows by head_dim, heads, and `more`: kernels of one of these groups are on one plot."""
    return grouped([{"heads": HEADS, **row} for row in rows], "head_dim", "heads", *more)


# ---- speed-up -------------------------------------------------------------------------------------------------------


def speedup(results: Results, series: Series) -> Section:
    """Time of the established route over that of each other one, against the context."""
    section = Section(
        "speedup",
        "Speed-up against context",
        "Time of the established route over the time of another, paired round by round in one interleaved run with a "
        "cold L2: median, and the quartiles as a shade. A ring is at the crossover: the smallest measured context from "
        "which on the lower quartile stays above 1.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["route"] != BASE]
        for (head_dim, heads, n), group in _by_shape(rows, "rows"):
            title = f"{_device(document)}, head_dim {head_dim}, {heads} heads, {n} rows"
            lines = []
            for (name,), of_route in grouped(group, "route"):
                speeds = [Speed(r["ctx"], r["rows"], None, None, r["over_base"], _pair(r), None) for r in of_route]
                crossing = crossover(speeds)
                lines.append(_speed_line(name, speeds, series, crossing.ctx if crossing else None))
            section.plots.append(_speed_plot(title, lines, BASE))
        section.tables.append(_bench_table(document))
    timed = {document["arch"] for document in results.tables}
    section.plots += _evidence_plots([r for r in results.evidence if r.arch not in timed], series)
    return section


def _speed_plot(title: str, lines: Sequence[Line], base: str) -> Plot:
    return Plot(title, "context, keys", f"speed-up over {base}", tuple(lines), log="xy", levels=((1.0,), base))


def _pair(row: Mapping[str, Any]) -> tuple[float, float]:
    low, high = row["over_base_quartiles"]
    return low, high


def _speed_line(name: str, speeds: Sequence[Speed], series: Series, crossing: int | None) -> Line:
    speeds = sorted(speeds, key=lambda s: s.ctx)
    spans = tuple(s.quartiles for s in speeds if s.quartiles)
    tips = [f"{name}, {s.ctx:,} keys: {s.ratio:.2f}x" for s in speeds]
    if len(spans) == len(speeds):
        tips = [f"{tip} ({low:.2f} .. {high:.2f})" for tip, (low, high) in zip(tips, spans, strict=True)]
    points = tuple((float(s.ctx), s.ratio) for s in speeds)
    shade = spans if len(spans) == len(speeds) else ()
    return Line(name, series.index(name), points, tuple(tips), shade, crossover=crossing)


def _evidence_plots(records: Sequence[Evidence], series: Series) -> list[Plot]:
    """A plot for each arch, workload, head_dim, heads, number of rows and revision of which there is more than one
    context."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for r in records:
        workload = route(r.route).workload
        base = routes_of(workload)[-1].name
        for (rows, revision), speeds in _by_run(r.speed).items():
            where = f"{r.arch} {workload}, head_dim {r.shape.head_dim}, {r.shape.n_heads}/{r.shape.n_kv_heads} heads"
            said = f"{r.kind} at {revision}" if revision else r.kind
            title = f"{where}{f', {rows} rows' if rows else ''}, {said}"
            if len(speeds) > 1:
                line = _speed_line(r.route, speeds, series, r.crossover.ctx if r.crossover else None)
                groups.setdefault((title, base), []).append(line)
    return [_speed_plot(title, lines, base) for (title, base), lines in groups.items()]


def _by_run(speeds: Iterable[Speed]) -> dict[tuple[int | None, str | None], list[Speed]]:
    groups: dict[tuple[int | None, str | None], list[Speed]] = {}
    for speed in speeds:
        groups.setdefault((speed.rows, speed.revision), []).append(speed)
    return groups


def _bench_table(document: Document) -> Table:
    columns = [
        "head_dim",
        "rows",
        "keys",
        "route",
        "time, us",
        "spread",
        f"speed-up over {BASE}",
        "quartiles",
        "share of reading once",
        "worst error",
    ]
    rows = [
        [
            number(r["head_dim"]),
            number(r["rows"]),
            number(r["ctx"], ",d"),
            Cell(r["route"]),
            number(r["us"], ".1f"),
            number(r["spread"], ".1%"),
            number(r["over_base"], ".2f"),
            Cell("{:.2f} .. {:.2f}".format(*r["over_base_quartiles"]), r["over_base_quartiles"][0]),
            number(r["share_of_read"], ".1%"),
            number(r["worst_error"], ".1e"),
        ]
        for r in document["rows"]
    ]
    caption = f"{_device(document)}, driver {document.get('driver')}, {document['compiler']}, {document['date']}"
    return Table(caption, columns, rows, [c for c in columns if c != "route"], folded=True)


# ---- roofline -------------------------------------------------------------------------------------------------------


def _megabytes(row: Mapping[str, Any]) -> float:
    """10^6 bytes of K and V in Q8_0 that the row's context has."""
    return Shape(row["ctx"], row["rows"], row["head_dim"], *_heads(row)).kv_bytes / 1e6


def roofline(results: Results, series: Series) -> Section:
    """Bytes of K and V against time, and what reading them once takes."""
    section = Section(
        "roofline",
        "Roofline: bytes against time",
        f"Bytes of K and V that the context has, against the time of a call with {ROOFLINE_ROWS} rows. The black line "
        f"is a kernel that does nothing but read them once, in the same run: no route that reads all keys can be below "
        f"it. Dashed: other libraries, on the same values in 16 bits.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["rows"] == ROOFLINE_ROWS]
        for (head_dim, heads), group in _by_shape(rows):
            lines = [_time_line(name, part, series, _megabytes) for (name,), part in grouped(group, "route")]
            for name, part in _peers(results, document, head_dim, heads).items():
                part = [row for row in part if row["rows"] == ROOFLINE_ROWS]
                if part:
                    lines.append(_time_line(name, part, series, lambda r: BF16_OVER_Q8 * _megabytes(r), hollow=True))
            floor = tuple(sorted({(_megabytes(r), r["read_us"]) for r in group}))
            name = f"reading once, {floor[-1][0] / floor[-1][1]:.2f} TB/s"  # 10^6 bytes a us are 10^12 a second
            title = f"{_device(document)}, head_dim {head_dim}, {heads} heads, {ROOFLINE_ROWS} rows"
            section.plots.append(Plot(title, "K and V, MB", "time, us", tuple(lines), log="xy", floor=(floor, name)))
    return section


def _time_line(
    name: str, rows: Rows, series: Series, size: Callable[[Mapping[str, Any]], float], hollow: bool = False
) -> Line:
    rows = sorted(rows, key=lambda r: r["ctx"])
    tips = tuple(f"{name}, {r['ctx']:,} keys: {r['us']:.1f} us, {size(r):.1f} MB" for r in rows)
    return Line(name, series.index(name), tuple((size(r), r["us"]) for r in rows), tips, (), hollow)


def _peers(results: Results, table: Document, head_dim: int, heads: str) -> dict[str, Rows]:
    """Rows of other libraries on the device of a table and at such a shape, by name; not the table's own routes."""
    own = {row["route"] for row in table["rows"]}
    found: dict[str, Rows] = {}
    for document in results.peers:
        for row in document["rows"] if _device(document) == _device(table) else ():
            alike = (row["head_dim"], row.get("heads", HEADS)) == (head_dim, heads)
            if alike and "us" in row and row["who"] not in own:
                found.setdefault(row["who"], []).append(row)
    return dict(sorted(found.items()))


# ---- error ----------------------------------------------------------------------------------------------------------


def error(results: Results, series: Series) -> Section:
    """Worst error against the float64 oracle, against the context."""
    section = Section(
        "error",
        "Error against context",
        "max|diff| / max|reference| of the worst row and head against the float64 oracle, on the buffers that were "
        "timed; the worst over all numbers of rows. Routes with equal bits lie on one another. Black: the limits that "
        "the routes are held to. Dashed: other libraries, in 16-bit arithmetic.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["worst_error"] is not None]
        for (head_dim, heads), group in _by_shape(rows):
            lines = [_error_line(name, part, series) for (name,), part in grouped(group, "route")]
            peers = _peers(results, document, head_dim, heads)
            lines += [_error_line(name, part, series, hollow=True) for name, part in peers.items()]
            limits = tuple(sorted({x for row in group if (x := _limit(row, document["arch"])) is not None}))
            title = f"{_device(document)}, head_dim {head_dim}, {heads} heads"
            named = f"limit {' and '.join(map(plain, limits))}"
            plot = Plot(title, "context, keys", "worst error", tuple(lines), log="xy", levels=(limits, named))
            section.plots.append(plot)
    return section


def _limit(row: Mapping[str, Any], arch: str) -> float | None:
    """What the kernel of a row is held to; None for a route that there is no more."""
    heads, kv_heads = _heads(row)
    request = AttendRequest(
        arch=arch, head_dim=row["head_dim"], n_heads=heads, n_kv_heads=kv_heads, rows=row["rows"], layout="chain"
    )
    known = [one for one in ROUTES if one.name == row["route"]]
    return known[0].variant(request).tolerance.worst_row if known else None


def _error_line(name: str, rows: Rows, series: Series, hollow: bool = False) -> Line:
    worst = {ctx: max(r["worst_error"] for r in group) for (ctx,), group in grouped(rows, "ctx")}
    tips = tuple(f"{name}, {ctx:,} keys: {e:.1e}" for ctx, e in worst.items())
    return Line(name, series.index(name), tuple((float(c), e) for c, e in worst.items()), tips, (), hollow)
