"""The parts of a report that are records: evidence, resources of builds, parity grids, fuzzing campaigns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hipfire_kernels.bench.report.parts import Cell, Section, Table, grouped, number
from hipfire_kernels.bench.report.results import Document
from hipfire_kernels.building.resources import IN_MEMORY, LABELS, Resources, diff
from hipfire_kernels.dispatch.evidence import status
from hipfire_kernels.dispatch.record import Evidence


def evidence(records: Sequence[Evidence]) -> Section:
    """What opens the routes."""
    columns = [
        "arch",
        "route",
        "head_dim",
        "heads",
        "kind",
        "sources",
        "cases",
        "worst error",
        "crossover, keys",
        "verdict",
        "why",
    ]
    rows = [
        [
            Cell(r.arch),
            Cell(r.route),
            number(r.shape.head_dim),
            Cell(f"{r.shape.n_heads}/{r.shape.n_kv_heads}", r.shape.n_heads),
            Cell(r.kind),
            Cell(status(r), tone="bad" if status(r) == "stale" else ""),
            number(r.parity.cases),
            number(r.parity.worst_error, ".1e"),
            number(r.crossover.ctx if r.crossover else None, ",d"),
            Cell("admitted", tone="good") if r.verdict.admitted else Cell("not admitted", tone="bad"),
            Cell(r.verdict.why, note=r.source),
        ]
        for r in records
    ]
    numeric = ["head_dim", "cases", "worst error", "crossover, keys"]
    tables = [Table(f"{len(rows)} records", columns, rows, numeric, prose="why")] if rows else []
    return Section(
        "evidence",
        "Evidence",
        "The records that open a route, or say why it stays closed. Stale: a source has changed since.",
        tables=tables,
    )


UNCHANGED = "none"


def resources(builds: Sequence[Document], against: Document | None) -> Section:
    """What each kernel takes from each arch, and what changed."""
    before = {(k["entry"], k["arch"]): k["resources"] for k in (against or {}).get("kernels", ())}
    kernels = [kernel for document in builds for kernel in document["kernels"]]
    section = Section(
        "resources", "Resources", "Read from the code objects. A kernel that spills or has scratch is red."
    )
    for (arch,), group in grouped(kernels, "arch"):
        rows = [_resource_row(k, before) for k in sorted(group, key=lambda k: str(k["entry"]))]
        columns = ["kernel", *(["changes"] if before else []), *LABELS.values()]
        compilers = ", ".join(sorted({str(k["compiler"]) for k in group}))
        caption = f"{arch} ({compilers})"
        if before:
            changed = [row for row in rows if row[1].text != UNCHANGED]
            caption += f", {len(changed) or 'none'} changed"
            if changed:
                section.tables.append(Table(caption, columns, changed, columns[2:]))
        section.tables.append(Table(caption, columns, rows, list(LABELS.values()), folded=True))
    return section


def _resource_row(kernel: Mapping[str, Any], before: Mapping[tuple[str, str], Any]) -> list[Cell]:
    taken = kernel["resources"]
    row = [Cell(kernel["entry"])]
    if before:
        row.append(_changes(before.get((kernel["entry"], kernel["arch"])), taken))
    for name in LABELS:
        cell = number(taken[name], "d")
        row.append(Cell(cell.text, cell.by, "bad") if name in IN_MEMORY and taken[name] else cell)
    return row


def _changes(old: Any, new: Any) -> Cell:
    if old is None:
        return Cell("new")
    found = [c for c in diff(Resources.from_dict(old), Resources.from_dict(new)) if c.field in LABELS]
    tones = {c.verdict for c in found}
    text = ", ".join(f"{LABELS[c.field]} {c.before} \u2192 {c.after}" for c in found)
    return Cell(text or UNCHANGED, len(found), "bad" if "worse" in tones else "good" if "better" in tones else "")


def parity(documents: Sequence[Document]) -> Section:
    """Grids on a device."""
    columns = ["variants", "longest context", "cases", "worst error", "failed"]
    tables = []
    for document in documents:
        rows = [
            [
                Cell(r["variant"]),
                number(r["longest"], ",d"),
                number(r["cases"], "d"),
                number(r["worst"], ".1e"),
                Cell(str(len(r["failed"])), len(r["failed"]), "bad" if r["failed"] else ""),
            ]
            for r in document["grid"]
        ]
        cases = sum(r["cases"] for r in document["grid"])
        tables.append(Table(f"{cases:,} cases", columns, rows, columns[1:], folded=True))
    intro = (
        "Every variant over the full grid, against the float64 oracle; the KV write in units of a quantisation step."
    )
    return Section("parity", "Parity", intro, tables=tables)


# ---- fuzzing --------------------------------------------------------------------------------------------------------


def fuzz(documents: Sequence[tuple[str, Document]]) -> Section:
    """Campaigns, each with the worst of every variant.

    Args:
        documents: name of the file and what is in it.
    """
    section = Section(
        "fuzz",
        "Fuzzing",
        "Drawn cases against the oracle and the exact invariants, after those that are known to have broken something. "
        "The error is in units of the case's limit: above 1 fails.",
    )
    for name, document in documents:
        found = document["failures"]
        devices = ", ".join(map(device, document["devices"]))
        caption = (
            f"{name}: {document['ledger']:,} known and {document['cases']:,} drawn cases in "
            f"{document['seconds']:,.0f} s on {devices}, {len(found) or 'no'} failures"
        )
        worst = [[Cell(variant), _over_limit(error)] for variant, error in sorted(document["worst"].items())]
        section.tables.append(
            Table(caption, ["variant", "worst error / limit"], worst, ["worst error / limit"], folded=True)
        )
        if found:
            section.tables.append(_failures(f"{name}: failures", [failure["shrunk"] for failure in found]))
    return section


def device(one: Document) -> str:
    """What a campaign ran on: of a GPU its model and driver."""
    name, driver = one.get("name", one["device"]), one.get("driver")
    return f"{name} (driver {driver})" if driver else str(name)


def _over_limit(error: float | None) -> Cell:
    """JSON has no infinity: it is null there."""
    value = math.inf if error is None else error
    return Cell(f"{value:.3f}", value, "bad" if value > 1 else "")


def _failures(caption: str, shrunk: Sequence[Document]) -> Table:
    rows = [
        [
            Cell(str(one["case"].get("variant"))),
            Cell(", ".join(f"{k}={v}" for k, v in one["case"].items() if k != "variant")),
            number(one["error"], ".3g"),
            number(one["limit"], "g"),
            Cell(one["fault"]),
        ]
        for one in shrunk
    ]
    return Table(caption, ["variant", "case", "error", "limit", "fault"], rows, ["error", "limit"], prose="case")
