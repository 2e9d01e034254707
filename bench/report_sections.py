"""The parts of a report with plots of kernels: speed-up, roofline, error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hipfire_kernels.bench import report_records as records
from hipfire_kernels.bench.kernels import BASE, Shape
from hipfire_kernels.bench.report_data import Cell, Document, Results, Section, Series, Table, grouped, number
from hipfire_kernels.bench.report_plots import Line, Plot
from hipfire_kernels.dispatch.qualify import crossover
from hipfire_kernels.dispatch.record import Evidence, Speed
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, routes_of
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES

Rows = list[dict[str, Any]]

BF16_OVER_Q8 = 2 * Q8_BLOCK / Q8_BYTES
"""Bytes of a 16-bit K or V over those in Q8_0."""

ROOFLINE_ROWS = 16


def sections(results: Results, against: Document | None) -> list[Section]:
    """All parts for which there are results.

    Args:
        against: an earlier build report, for the changes.
    """
    series = Series(row.name for row in reversed(routes_of("verify")))
    found = [
        speedup(results, series),
        roofline(results, series),
        error(results, series),
        records.evidence(results.evidence),
        records.resources(results.builds, against),
        records.runs(results.runs),
        records.parity(results.parity),
        records.fuzz(results.fuzz),
    ]
    return [section for section in found if section.plots or section.tables or section.runs]


def _device(document: Document) -> str:
    return str(document.get("name") or document.get("device"))


# ---- from the bench table -------------------------------------------------------------------------------------------


def speedup(results: Results, series: Series) -> Section:
    """Time of the established route over that of each other one, against the context."""
    section = Section(
        "speedup",
        "Speed-up against context",
        f"Time of {BASE} over the time of a route, paired round by round in one interleaved run with a cold L2: "
        f"median, and the quartiles as a shade. A dotted line marks the crossover: the smallest measured context from "
        f"which on the lower quartile stays above 1.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["route"] != BASE]
        for (head_dim, n), group in grouped(rows, "head_dim", "rows"):
            title = f"{_device(document)}, head_dim {head_dim}, {n} rows"
            section.plots.append(_speed_plot(title, group, series))
        section.tables.append(_bench_table(document))
    timed = {document["arch"] for document in results.tables}
    section.plots += _evidence_plots([r for r in results.evidence if r.arch not in timed], series)
    return section


def _speed_plot(title: str, rows: Rows, series: Series) -> Plot:
    lines, marks = [], []
    for (route,), group in grouped(rows, "route"):
        speeds = [Speed(r["ctx"], r["rows"], None, None, r["over_base"], _pair(r), None) for r in group]
        lines.append(_speed_line(route, speeds, series))
        if (crossing := crossover(speeds)) is not None:
            marks.append((float(crossing.ctx), f"{route} from {crossing.ctx:,}", series.index(route)))
    return Plot(title, "context, keys", "speed-up", tuple(lines), log="xy", levels=((1, BASE),), marks=tuple(marks))


def _pair(row: Mapping[str, Any]) -> tuple[float, float]:
    low, high = row["over_base_quartiles"]
    return low, high


def _speed_line(route: str, speeds: Sequence[Speed], series: Series) -> Line:
    speeds = sorted(speeds, key=lambda s: s.ctx)
    spans = tuple(s.quartiles for s in speeds if s.quartiles)
    tips = [f"{route}, {s.ctx:,} keys: {s.ratio:.2f}x" for s in speeds]
    if len(spans) == len(speeds):
        tips = [f"{tip} ({low:.2f} .. {high:.2f})" for tip, (low, high) in zip(tips, spans, strict=True)]
    points = tuple((float(s.ctx), s.ratio) for s in speeds)
    return Line(route, series.index(route), points, tuple(tips), spans if len(spans) == len(speeds) else ())


def _evidence_plots(records: Sequence[Evidence], series: Series) -> list[Plot]:
    """A plot for each arch, head_dim, number of rows and revision of which there is more than one context."""
    groups: dict[str, list[tuple[Evidence, Sequence[Speed]]]] = {}
    for record in records:
        for (rows, revision), speeds in _by_run(record.speed).items():
            where = f"{record.arch}, head_dim {record.shape.head_dim}{f', {rows} rows' if rows else ''}"
            title = f"{where}, {record.kind}{f' at {revision}' if revision else ''}"
            if len(speeds) > 1:
                groups.setdefault(title, []).append((record, speeds))
    found = []
    for title, parts in groups.items():
        lines = tuple(_speed_line(record.route, speeds, series) for record, speeds in parts)
        marks = tuple(
            (float(r.crossover.ctx), f"{r.route} from {r.crossover.ctx:,}", series.index(r.route))
            for r, _ in parts
            if r.crossover
        )
        found.append(Plot(title, "context, keys", "speed-up", lines, log="xy", levels=((1, BASE),), marks=marks))
    return found


def _by_run(speeds: Iterable[Speed]) -> dict[tuple[int | None, str | None], list[Speed]]:
    groups: dict[tuple[int | None, str | None], list[Speed]] = {}
    for speed in speeds:
        groups.setdefault((speed.rows, speed.revision), []).append(speed)
    return groups


def _bench_table(document: Document) -> Table:
    columns = ["head_dim", "rows", "ctx", "route", "us", "spread", "speed-up", "quartiles", "share of read", "error"]
    rows = [
        [
            number(r["head_dim"]),
            number(r["rows"]),
            Cell(f"{r['ctx']:,}", r["ctx"]),
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


def _megabytes(row: Mapping[str, Any]) -> float:
    return Shape(row["ctx"], row["rows"], row["head_dim"], *_heads(row)).kv_bytes / 1e6


def _heads(row: Mapping[str, Any]) -> tuple[int, int]:
    heads, kv_heads = str(row.get("heads", "24/4")).split("/")
    return int(heads), int(kv_heads)


def roofline(results: Results, series: Series) -> Section:
    """Bytes of K and V against time, and what reading them once takes."""
    section = Section(
        "roofline",
        "Roofline: bytes against time",
        f"Bytes of K and V that the context has, against the time of a call with {ROOFLINE_ROWS} rows. The line is a "
        f"kernel that does nothing but read them once, in the same run: no route that reads all keys can be below it. "
        f"Dashed: other libraries, on the same values in 16 bits.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["rows"] == ROOFLINE_ROWS]
        for (head_dim,), group in grouped(rows, "head_dim"):
            lines = [_time_line(name, part, series, _megabytes) for (name,), part in grouped(group, "route")]
            lines += _peer_lines(results, document, head_dim, series, "us")
            floor = tuple(sorted({(_megabytes(r), r["read_us"]) for r in group}))
            name = f"read once, {floor[-1][0] / floor[-1][1]:.2f} TB/s"
            title = f"{_device(document)}, head_dim {head_dim}, {ROOFLINE_ROWS} rows"
            plot = Plot(title, "MB of K and V", "us a call", tuple(lines), log="xy", floor=(floor, name))
            section.plots.append(plot)
    return section


def _time_line(name: str, rows: Rows, series: Series, size: Any, hollow: bool = False) -> Line:
    rows = sorted(rows, key=lambda r: r["ctx"])
    tips = tuple(f"{name}, {r['ctx']:,} keys: {r['us']:.1f} us, {size(r):.1f} MB" for r in rows)
    return Line(name, series.index(name), tuple((size(r), r["us"]) for r in rows), tips, (), hollow)


def _peer_lines(results: Results, table: Document, head_dim: int, series: Series, of: str) -> list[Line]:
    """Other libraries on the device of a table: their times, or their errors."""
    own = {row["route"] for row in table["rows"]}
    lines = []
    for document in results.peers:
        rows = [
            r
            for r in document["rows"]
            if _device(document) == _device(table) and r["head_dim"] == head_dim and "us" in r and r["who"] not in own
        ]
        for (name,), group in grouped(rows, "who"):
            if of == "us":
                lines.append(_time_line(name, group, series, lambda r: BF16_OVER_Q8 * _megabytes(r), hollow=True))
            else:
                lines.append(_error_line(name, group, series, hollow=True))
    return lines


def error(results: Results, series: Series) -> Section:
    """Worst error against the float64 oracle, against the context."""
    section = Section(
        "error",
        "Error against context",
        "max|diff| / max|reference| of the worst row and head against the float64 oracle, on the buffers that were "
        "timed; the worst over all numbers of rows. Routes with equal bits lie on one another. Dashed: other "
        "libraries, in 16-bit arithmetic.",
    )
    for document in results.tables:
        rows = [row for row in document["rows"] if row["worst_error"] is not None]
        for (head_dim,), group in grouped(rows, "head_dim"):
            lines = [_error_line(name, part, series) for (name,), part in grouped(group, "route")]
            lines += _peer_lines(results, document, head_dim, series, "error")
            limits = sorted({limit for row in group if (limit := _limit(row, document["arch"])) is not None})
            title, levels = (
                f"{_device(document)}, head_dim {head_dim}",
                [(limit, f"limit {limit:g}") for limit in limits],
            )
            section.plots.append(
                Plot(title, "context, keys", "worst error", tuple(lines), log="xy", levels=tuple(levels))
            )
    return section


def _limit(row: Mapping[str, Any], arch: str) -> float | None:
    """What the kernel of a row is held to; None for a route that there is no more."""
    heads, kv_heads = _heads(row)
    request = AttendRequest(
        arch=arch, head_dim=row["head_dim"], n_heads=heads, n_kv_heads=kv_heads, rows=row["rows"], layout="chain"
    )
    known = [route for route in ROUTES if route.name == row["route"]]
    return known[0].variant(request).tolerance.worst_row if known else None


def _error_line(name: str, rows: Rows, series: Series, hollow: bool = False) -> Line:
    worst = {ctx: max(r["worst_error"] for r in group) for (ctx,), group in grouped(rows, "ctx")}
    tips = tuple(f"{name}, {ctx:,} keys: {e:.1e}" for ctx, e in worst.items())
    return Line(name, series.index(name), tuple((float(c), e) for c, e in worst.items()), tips, (), hollow)
