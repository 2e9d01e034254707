"""The parts of a report that are records: evidence, resources of builds, A/B runs, parity grids, fuzzing campaigns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hipfire_kernels.bench.ab import beside
from hipfire_kernels.bench.pairs import OFF, ON, Judgement
from hipfire_kernels.bench.report_data import Cell, Document, Run, Section, Table, grouped, number
from hipfire_kernels.bench.report_plots import Line, Plot
from hipfire_kernels.building.resources import LABELS, Resources, diff
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
        "crossover",
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
            Cell(f"{r.verdict.why} ({r.source})"),
        ]
        for r in records
    ]
    tables = [Table("Records", columns, rows, ["head_dim", "cases", "worst error", "crossover"])] if rows else []
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
        in_memory = name in ("vgpr_spills", "sgpr_spills", "scratch_bytes") and taken[name]
        row.append(Cell(cell.text, cell.by, "bad") if in_memory else cell)
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


# ---- A/B ------------------------------------------------------------------------------------------------------------


def runs(documents: Sequence[Document]) -> Section:
    """Each A/B run with its pairs."""
    return Section(
        "ab",
        "A/B pairs",
        "Every sample is a fresh process, in an order declared before. A dot is a pair of neighbours: off over on, so "
        "that above 1 on is faster. The shade is the bootstrap interval of the median over pairs; a verdict needs it "
        "to leave out 1, and signs that equal arms would not show in 2,000 runs.",
        runs=[_run(document) for document in documents],
    )


def _run(document: Document) -> Run:
    arms = document.get("arms")
    title = f"{document['variable']}: {arms[OFF]} (off), {arms[ON]} (on)" if arms else str(document["variable"])
    stopped = document.get("refused") or document.get("traced")
    if stopped or not document.get("judgement"):
        return Run(title, f"no times: {stopped}", False, None, _facts(document))
    judged = Judgement.from_dict(document["judgement"])
    pairs = document["ratios"]
    tips = tuple(f"pair {n}: {r:.4f}" for n, r in enumerate(pairs, 1))
    line = Line("pairs", 0, tuple((float(n), r) for n, r in enumerate(pairs, 1)), tips)
    plot = Plot(title, "pair", "off / on", (line,), log="", levels=((1, "equal"),), band=judged.interval, joined=False)
    return Run(title, judged.describe(), judged.verdict is not None, plot, _facts(document))


def _facts(document: Document) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    pinned = document.get("pinned", {})
    machine = pinned.get("machine", {})
    found.append(("machine", ", ".join(str(machine[n]) for n in ("device", "driver", "toolchain") if machine.get(n))))
    found.append(("set", _switches(pinned.get("environment", {}).get("shown", {}))))
    if "shape" in pinned:
        shape = pinned["shape"]
        found.append(("shape", f"{shape['ctx']:,} keys, {shape['rows']} rows, head_dim {shape['head_dim']}"))
    if "prompt" in pinned:
        equal = document.get("equal") or {}
        found.append(("prompt", f"{pinned['prompt']['tokens']:,} tokens, {pinned['prompt']['sha256'][:12]}"))
        if equal:
            found.append(("equal", f"{equal['tokens']} tokens, {equal['cycles']} cycles, tau {equal['tau']:.3f}"))
            found += [(f"ran {arm}", _counted(ran["routes"])) for arm, ran in equal["ran"].items()]
    for arm, value in (document.get("medians") or {}).items():
        found.append((arm, f"{value:.6g} {document['unit']}, {beside(document, arm)}"))
    found.append(("code", str(pinned.get("code", ""))[:12]))
    return [(name, text) for name, text in found if text]


def _switches(shown: Mapping[str, str]) -> str:
    """What both arms had set of this library's switches; paths are digests, and say nothing."""
    ours = {
        name: text for name, text in shown.items() if name.startswith("HIPFIRE_") and not text.startswith("sha256 ")
    }
    return ", ".join(f"{name}={text}" for name, text in ours.items())


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())


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
        caption = (
            f"{name}: {document['ledger']:,} known and {document['cases']:,} drawn cases in "
            f"{document['seconds']:,.0f} s on {_devices(document)}, {len(found) or 'no'} failures"
        )
        worst = [[Cell(variant), _over_limit(error)] for variant, error in sorted(document["worst"].items())]
        section.tables.append(Table(caption, ["variant", "worst error / limit"], worst, ["worst error / limit"], True))
        if found:
            section.tables.append(_failures(f"{name}: failures", [failure["shrunk"] for failure in found]))
    return section


def _devices(document: Document) -> str:
    """What a campaign ran on: of a GPU its model and driver."""
    named = ((one.get("name", one["device"]), one.get("driver")) for one in document["devices"])
    return ", ".join(f"{name} (driver {driver})" if driver else str(name) for name, driver in named)


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
    return Table(caption, ["variant", "case", "error", "limit", "fault"], rows, ["error", "limit"])
