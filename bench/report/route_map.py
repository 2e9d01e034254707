"""The route map: what `admit` decides for every number of rows and context, by arch and head_dim."""

from __future__ import annotations

from itertools import groupby

from hipfire_kernels.archs import ARCHS
from hipfire_kernels.bench.report.parts import Section, Series
from hipfire_kernels.dispatch import AttendRequest, admit
from hipfire_kernels.dispatch.admission import Decision
from hipfire_kernels.dispatch.checks import Check
from hipfire_kernels.dispatch.routes import routes_of

CONTEXTS = (512, 2048, 4096, 4097, 8192, 8193, 20676, 32768, 65536, 131072, 262144)
"""With one key beyond the bounds that minimum contexts and crossovers usually have."""

ROWS = range(1, 34)
HEAD_DIMS = (64, 128, 256)
HEADS = (24, 4)


def route_map() -> Section:
    """The map of this installation: its evidence, and the switches of this environment."""
    series = Series(row.name for row in reversed(routes_of("verify")))
    reasons: dict[str, int] = {}
    maps = {
        arch: {str(head_dim): _map(arch, head_dim, reasons) for head_dim in HEAD_DIMS}
        for arch in ARCHS
        if arch != "host"
    }
    used = {cell[0] for dims in maps.values() for rows in dims.values() for _, cells in rows for cell in cells}
    document = {
        "contexts": CONTEXTS,
        "routes": {name: series.index(name) for name in sorted(used - {"none"}, key=series.index)},
        "reasons": list(reasons),
        "maps": maps,
    }
    intro = (
        f"Verify calls of a chain, {HEADS[0]}/{HEADS[1]} heads, not captured, as this installation decides them. "
        f"Of the admitted routes the one that was measured as the fastest runs. Choose a cell to see why others "
        f"are not admitted."
    )
    return Section("routes", "Route map", intro, map=document)


def _map(arch: str, head_dim: int, reasons: dict[str, int]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Rows that are decided alike are one row of the map: its label, and route and reason of each context."""
    decided = [(rows, [_cell(arch, head_dim, rows, ctx, reasons) for ctx in CONTEXTS]) for rows in ROWS]
    found = []
    for cells, group in groupby(decided, key=lambda pair: pair[1]):
        alike = [rows for rows, _ in group]
        last = "+" if alike[-1] == ROWS[-1] else ""
        found.append((f"{alike[0]}{last}" if len(alike) == 1 else f"{alike[0]} \u2013 {alike[-1]}{last}", cells))
    return found


def _cell(arch: str, head_dim: int, rows: int, ctx: int, reasons: dict[str, int]) -> tuple[str, int]:
    request = AttendRequest(
        arch=arch,
        kv_format="q8_0",
        head_dim=head_dim,
        n_heads=HEADS[0],
        n_kv_heads=HEADS[1],
        rows=rows,
        logical_ctx=ctx,
        layout="chain",
        capturing=False,
        recording=False,
    )
    decision = admit(request)
    return decision.route or "none", reasons.setdefault(_reason(decision), len(reasons))


def _reason(decision: Decision) -> str:
    """Why each route that is not admitted is not; what was seen is left out, the map shows it."""
    lines = (f"not {name}: " + "; ".join(map(_in_words, failed)) for name, failed in decision.rejected.items())
    return "\n".join(lines)


def _in_words(check: Check) -> str:
    if check.name == "evidence":
        return f"evidence: {check.observed or 'none'}, required: {check.required}"
    return f"{check.name} must be {check.required}"
