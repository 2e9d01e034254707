"""The report: one page that needs nothing else, made of every kind of result."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hipfire_kernels import families
from hipfire_kernels.bench.kernels import BASE
from hipfire_kernels.bench.report import curves, html, plots, records, results, route_map, runs
from hipfire_kernels.bench.report.parts import Section, Series, Table
from hipfire_kernels.bench.report.plots import Plot, legend, plain, short
from hipfire_kernels.building.resources import LABELS
from hipfire_kernels.cli import app
from hipfire_kernels.dispatch import AttendRequest, admit, evidence
from hipfire_kernels.dispatch.record import Crossover, Evidence, Parity, Shape, Speed, Verdict
from hipfire_kernels.errors import InputError

ROOT = Path(__file__).parent.parent
EVIDENCE, RECORDED = ROOT / "dispatch" / "evidence", ROOT / "bench" / "results"
SHOWN = [
    *(RECORDED / f"{name}.json" for name in ("h200-table", "h200-peers", "h200-ab", "h200-parity", "h200-fuzz")),
    *sorted(EVIDENCE.glob("*.json")),
]
"""Files that the project's own page is made of."""

needs_plots = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (the bench extra)"
)


def bench_row(route: str, ctx: int, ratio: float, quartile: float, **other: Any) -> dict[str, Any]:
    row = {"ctx": ctx, "rows": 16, "head_dim": 256, "heads": "24/4", "route": route, "us": 900 / ratio, "spread": 0.01}
    measured = {"over_base": ratio, "over_base_quartiles": [quartile, ratio + 0.1], "read_us": ctx / 1000}
    return {**row, **measured, "share_of_read": 0.1, "worst_error": 5e-7, **other}


TABLE = {
    "name": "Card <1>",
    "arch": "sm_90",
    "driver": "1.2",
    "compiler": "nvrtc 1",
    "date": "2026-01-02",
    "rows": [
        *(bench_row(BASE, ctx, 1.0, 1.0) for ctx in (2048, 4096, 8192)),
        bench_row("rows8", 2048, 0.8, 0.7),
        bench_row("rows8", 4096, 1.2, 0.99),
        bench_row("rows8", 8192, 2.0, 1.9),
    ],
}
PEERS = {
    **{n: TABLE[n] for n in ("name", "date", "compiler")},
    "torch": "2.9",
    "rows": [
        {"ctx": 8192, "rows": 16, "head_dim": 256, "who": "sdpa_flash", "us": 50.0, "worst_error": 5e-3},
        {"ctx": 8192, "head_dim": 256, "who": "flex", "refused": "not here"},
        {"ctx": 8192, "rows": 16, "head_dim": 256, "who": "rows8", "us": 450.0, "worst_error": 5e-7},
    ],
}
JUDGED = {
    "ratio": 1.5,
    "interval": [1.4, 1.6],
    "level": 0.999,
    "pairs": 12,
    "agreeing": 12,
    "chance": 0.0005,
    "verdict": "on is faster",
}
MACHINE = {"device": "Card", "driver": "driver 1.2", "toolchain": "nvrtc: nvrtc 13.0"}
RUN = {
    "kind": "ab",
    "mode": "kernel",
    "variable": "kernel",
    "arms": {"off": "tile_batched", "on": "rows8", "ar": "1 row"},
    "date": "2026-01-02T00:00:00+00:00",
    "pinned": {"code": "abc", "machine": MACHINE, "shape": {"ctx": 8192, "rows": 16, "head_dim": 256}},
    "refused": None,
    "traced": None,
    "unit": "us a call",
    "medians": {"off": 3.0, "on": 2.0, "ar": 1.0},
    "anchor": {"off": 5.0, "on": 8.0},
    "ratios": [1.5] * 12,
    "judgement": JUDGED,
}
BUILD = {
    "kernels": [
        {"entry": "k", "arch": "gfx1100", "compiler": "clang 1", "resources": {"vgprs": 104, "occupancy": 12}},
        {"entry": "new", "arch": "gfx1100", "compiler": "clang 1", "resources": {"vgprs": 8, "scratch_bytes": 64}},
    ]
}
PARITY = {"grid": [{"variant": "k", "longest": 4097, "cases": 7, "worst": 1e-6, "failed": []}]}
CASE = {"case": {"variant": "k", "rows": 3}, "error": None, "limit": 1e-5, "fault": "NaN"}
FUZZ = {
    "cases": 20000,
    "ledger": 5,
    "devices": [{"device": "cuda:0", "arch": "sm_90", "name": "NVIDIA H200", "driver": "580.1"}, {"device": "host"}],
    "seconds": 60.0,
    "date": "2026-01-03",
    "worst": {"k": 0.25, "broken": None},
    "failures": [{"found": CASE, "shrunk": CASE}],
}


def full(kernel: dict[str, Any]) -> dict[str, Any]:
    fields = ("vgprs", "sgprs", "vgpr_spills", "sgpr_spills", "scratch_bytes", "lds_bytes", "occupancy", "code_bytes")
    return {**kernel, "resources": {name: kernel["resources"].get(name, 0) for name in fields}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("results")
    evidence = EVIDENCE / "gfx1100.json"
    build = {"kernels": [full(k) for k in BUILD["kernels"]]}
    contents = {"table": TABLE, "peers": PEERS, "runs": [RUN, {**RUN, "refused": "tokens differ", "judgement": None}]}
    contents |= {"build": build, "parity": PARITY, "fuzz": FUZZ, "other": {"something": 1}}
    found = {name: folder / f"{name}.json" for name in contents}
    for name, value in contents.items():
        found[name].write_text(json.dumps(value), encoding="utf-8")
    return {**found, "evidence": evidence}


# ---- reading --------------------------------------------------------------------------------------------------------


def test_files_are_told_apart_by_what_they_hold(files: dict[str, Path]) -> None:
    found = results.read(files.values())
    assert [len(part) for part in (found.tables, found.peers, found.builds, found.parity, found.fuzz)] == [1] * 5
    assert len(found.runs) == 2
    assert {r.arch for r in found.evidence} == {"gfx1100"}
    assert found.passed_over == ["other.json"]


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    broken = tmp_path / "a.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.json is no JSON"):
        results.read([broken])
    with pytest.raises(InputError, match="cannot be read"):
        results.read([tmp_path / "none.json"])


# ---- what the parts say ---------------------------------------------------------------------------------------------


def of(*files: Path | dict[str, Any]) -> results.Results:
    """The results of files, and of bench tables as they are."""
    found = results.read([file for file in files if isinstance(file, Path)])
    found.tables += [document for document in files if isinstance(document, dict)]
    return found


def measured(route: str, heads: tuple[int, int] = (24, 4), **changes: Any) -> Evidence:
    """A record of sm_90 as `hfk qualify` writes one, of the sources of today."""
    kernels = [v.entry for v in families()["attention_verify_mma_q8"].variants()][:2]
    return Evidence(
        **{
            "arch": "sm_90", "device": "Card", "driver": "driver 1, driver_api 2", "toolchain": "nvrtc: nvrtc 13.0",
            "date": "2026-01-04", "route": route, "kind": "measured", "shape": Shape(256, *heads, (16,)),
            "parity": Parity(40, 1e-6, 1e-5, True),
            "speed": tuple(Speed(ctx, 16, 1.0, 2.0, 2.0, (1.9, 2.1), None) for ctx in (2048, 4096)),
            "crossover": Crossover(2048, None, 4096), "verdict": Verdict(True, "2.00x"), "source": "a test",
            "digests": {entry: str(evidence.source_digest(entry, "sm_90")) for entry in kernels}, **changes,
        }
    )  # fmt: skip


def series() -> Series:
    return Series([BASE, "rows8"])


def test_the_crossover_is_the_one_that_evidence_has(files: dict[str, Path]) -> None:
    """The first context from which on the lower quartile stays above 1: 4096 has a ratio of 1.2 and is not it."""
    (plot,) = curves.speedup(of(files["table"]), series()).plots
    (line,) = plot.lines
    assert (line.name, line.crossover) == ("rows8", 8192)
    assert line.points == ((2048.0, 0.8), (4096.0, 1.2), (8192.0, 2.0))
    assert line.spans == ((0.7, 0.8 + 0.1), (0.99, 1.2 + 0.1), (1.9, 2.0 + 0.1))
    assert [entry.text for entry in legend(plot)] == ["rows8, faster from 8,192 on", BASE]


def test_the_roofline_has_a_floor_and_other_libraries_with_their_own_bytes(files: dict[str, Path]) -> None:
    (plot,) = curves.roofline(of(files["table"], files["peers"]), series()).plots
    own, peer = (next(line for line in plot.lines if line.name == name) for name in ("rows8", "sdpa_flash"))
    assert plot.floor is not None
    assert own.points[-1][0] == plot.floor[0][-1][0] == 2 * 8192 * 4 * 8 * 34 / 1e6
    assert own.points[-1][1] == 900 / 2.0
    assert peer.points[0][0] == pytest.approx(own.points[-1][0] * 64 / 34)
    assert (peer.hollow, own.hollow) == (True, False)


def test_the_units_are_those_of_the_values(files: dict[str, Path]) -> None:
    """17.8 MB read in 8.192 us are 2.18 TB/s."""
    everything = of(files["table"], files["peers"], files["runs"])
    (speed,), (roof,) = (part(everything, series()).plots for part in (curves.speedup, curves.roofline))
    assert (speed.x, speed.y) == ("context, keys", f"speed-up over {BASE}")
    assert (roof.x, roof.y) == ("K and V, MB", "time, us")
    assert roof.floor is not None
    assert roof.floor[1] == "reading once, 2.18 TB/s"
    tips = {line.name: line.tips[-1] for line in (*speed.lines, *roof.lines)}
    assert tips["rows8"] == "rows8, 8,192 keys: 450.0 us, 17.8 MB"
    assert speed.lines[0].tips[-1] == "rows8, 8,192 keys: 2.00x (1.90 .. 2.10)"
    (table,) = curves.speedup(everything, series()).tables
    shown = dict(zip(table.columns, (cell.text for cell in table.rows[-1]), strict=True))
    assert shown == {
        "head_dim": "256", "rows": "16", "keys": "8,192", "route": "rows8", "time, us": "450.0", "spread": "1.0%",
        f"speed-up over {BASE}": "2.00", "quartiles": "1.90 .. 2.10", "share of reading once": "10.0%",
        "worst error": "5.0e-07",
    }  # fmt: skip
    facts = dict(runs.runs(everything.runs).runs[0].facts)
    assert facts["off"] == "3 us a call, a row 5.000x as fast as one row alone"


def test_the_roofline_shows_calls_of_one_number_of_rows_at_one_shape_on_one_device(files: dict[str, Path]) -> None:
    others = [{"rows": 4}, {"head_dim": 128}, {"heads": "32/8"}]
    table = {**TABLE, "rows": [*TABLE["rows"], *(bench_row("rows8", 512, 1.0, 1.0, **other) for other in others)]}
    peer = PEERS["rows"][0]
    elsewhere = [{"name": "another", "rows": [{**peer, "who": "elsewhere"}]}]
    elsewhere += [{"name": TABLE["name"], "rows": [{**peer, "who": "else", **other}]} for other in others]
    found = of(table, files["peers"])
    found.peers += elsewhere
    drawn = {plot.title: plot for plot in curves.roofline(found, series()).plots}
    assert list(drawn) == [
        "Card <1>, head_dim 128, 24/4 heads, 16 rows",
        "Card <1>, head_dim 256, 24/4 heads, 16 rows",
        "Card <1>, head_dim 256, 32/8 heads, 16 rows",
    ]
    plot = drawn["Card <1>, head_dim 256, 24/4 heads, 16 rows"]
    assert [line.name for line in plot.lines] == ["rows8", BASE, "sdpa_flash"]
    assert 512 not in [x for line in plot.lines for x, _ in line.points]


def test_a_legend_has_what_its_plot_holds(files: dict[str, Path]) -> None:
    (alone,) = curves.roofline(of(files["table"]), series()).plots
    assert [entry.text for entry in legend(alone)] == [BASE, "rows8", "reading once, 2.18 TB/s"]
    (beside,) = curves.roofline(of(files["table"], files["peers"]), series()).plots
    assert [(e.kind, e.text) for e in legend(beside)] == [
        ("series", BASE),
        ("series", "rows8"),
        ("hollow", "sdpa_flash"),
        ("floor", "reading once, 2.18 TB/s"),
    ]
    (errors,) = curves.error(of(files["table"]), series()).plots
    assert (legend(errors)[-1].kind, legend(errors)[-1].text) == ("level", "limit 1e-5")
    (judged, _) = runs.runs(of(files["runs"]).runs).runs
    assert judged.plot is not None
    kinds = [(e.kind, e.text) for e in legend(judged.plot)]
    assert kinds == [("dots", "pairs"), ("level", "equal"), ("band", "interval of the median at 99.9%")]


def test_errors_have_the_limit_of_the_kernels(files: dict[str, Path]) -> None:
    (plot,) = curves.error(of(files["table"]), series()).plots
    assert plot.levels == ((1e-5,), "limit 1e-5")


@pytest.mark.parametrize("errors", [(5e-7, 3e-6, 9e-8), (3e-6, 9e-8, 5e-7), (9e-8, 5e-7, 3e-6)])
def test_of_several_numbers_of_rows_the_worst_error_is_drawn(errors: tuple[float, ...]) -> None:
    rows = [bench_row("rows8", 4096, 1.0, 1.0, rows=4 * i + 4, worst_error=e) for i, e in enumerate(errors)]
    (plot,) = curves.error(of({**TABLE, "rows": rows}), series()).plots
    assert plot.lines[0].points == ((4096.0, 3e-6),)
    assert plot.lines[0].tips == ("rows8, 4,096 keys: 3.0e-06",)


def test_reported_speeds_are_shown_where_nothing_was_measured(files: dict[str, Path]) -> None:
    drawn = curves.speedup(of(files["evidence"]), Series([BASE, "rows4", "rows8"])).plots
    assert [plot.title for plot in drawn] == [
        f"gfx1100 verify, head_dim 256, 24/4 heads, reported at {revision}" for revision in ("c91f4b6", "de2448f")
    ]
    assert {line.name for line in drawn[0].lines} == {"rows4", "rows8"}
    measured_there = of({**TABLE, "arch": "gfx1100"}, files["evidence"])
    assert not [p for p in curves.speedup(measured_there, series()).plots if "reported" in p.title]


def test_no_curve_is_there_twice() -> None:
    """Of records for several numbers of heads, of tables of several shapes, beside other libraries."""
    every: list[Plot] = []
    several = of(EVIDENCE / "gfx1100.json")
    for heads in ((24, 4), (32, 8), (16, 2)):
        several.evidence += [measured(route, heads) for route in ("verify_mma", "verify_gqa", "dflash_n64")]
    for found in (several, of(*SHOWN), of(RECORDED / "h200-multirow.json")):
        for part in (curves.speedup, curves.roofline, curves.error):
            drawn = part(found, series()).plots
            assert len({plot.title for plot in drawn}) == len(drawn)
            every += drawn
    assert len(every) > 20
    for plot in every:
        names = [line.name for line in plot.lines]
        assert sorted(set(names)) == sorted(names), plot.title
        assert len({(line.index, line.hollow) for line in plot.lines}) == len(names)
        for line in plot.lines:
            assert [x for x, _ in line.points] == sorted({x for x, _ in line.points}), (plot.title, line.name)


def test_evidence_is_beside_the_route_it_was_measured_against() -> None:
    found = of()
    found.evidence += [measured("dflash_n64"), measured("verify_mma")]
    drawn = curves.speedup(found, series()).plots
    against = {line.name: plot.y for plot in drawn for line in plot.lines}
    assert against["dflash_n64"] == "speed-up over dflash_scalar"
    assert against["verify_mma"] == f"speed-up over {BASE}"


IN_MEMORY = {"vgpr_spills": "VGPR spills", "sgpr_spills": "SGPR spills", "scratch_bytes": "scratch B"}


@pytest.mark.parametrize("field", [*IN_MEMORY, "vgprs", "lds_bytes"])
def test_each_kind_of_memory_that_a_kernel_must_not_take_is_red_alone(field: str) -> None:
    kernel = {**BUILD["kernels"][0], "resources": {field: 1}}
    (table,) = records.resources([{"kernels": [full(kernel)]}], None).tables
    red = [name for name, cell in zip(table.columns, table.rows[0], strict=True) if cell.tone == "bad"]
    assert red == ([LABELS[field]] if field in IN_MEMORY else [])


def test_changes_of_resources_and_what_is_in_memory(files: dict[str, Path]) -> None:
    before = json.loads(json.dumps({"kernels": [full(BUILD["kernels"][0])]}))
    before["kernels"][0]["resources"] |= {"vgprs": 112, "occupancy": 12}
    builds = of(files["build"]).builds
    changed, whole = records.resources(builds, before).tables
    assert [row[1].text for row in changed.rows] == ["VGPR 112 \u2192 104", "new"]
    assert changed.rows[0][1].tone == "good"
    scratch = list(whole.columns).index("scratch B")
    assert [row[scratch].tone for row in whole.rows] == ["", "bad"]


def test_ab_runs_without_times_say_why(files: dict[str, Path]) -> None:
    judged, refused = runs.runs(of(files["runs"]).runs).runs
    assert judged.verdict.startswith("on is faster")
    assert judged.plot is not None
    assert judged.plot.band is not None
    assert judged.plot.band[0] == (1.4, 1.6)
    assert (refused.verdict, refused.plot, refused.shown) == ("no times: tokens differ", None, False)


def test_pairs_are_numbered_from_1_in_the_order_they_were_taken() -> None:
    ratios = [1.5, 1.25, 2.0]
    (run,) = runs.runs([{**RUN, "ratios": ratios}]).runs
    assert run.plot is not None
    (line,) = run.plot.lines
    assert line.points == ((1.0, 1.5), (2.0, 1.25), (3.0, 2.0))
    assert line.tips == ("pair 1: 1.5000", "pair 2: 1.2500", "pair 3: 2.0000")
    assert (run.plot.levels[0], run.plot.y, run.plot.joined) == ((1.0,), "off / on", False)


def test_fuzz_campaigns(files: dict[str, Path]) -> None:
    worst, failures = records.fuzz(of(files["fuzz"]).fuzz).tables
    assert "20,000 drawn cases in 60 s on NVIDIA H200 (driver 580.1), host, 1 failures" in worst.caption
    assert [(row[0].text, row[1].text, row[1].tone) for row in worst.rows] == [
        ("broken", "inf", "bad"),
        ("k", "0.250", ""),
    ]
    assert failures.rows[0][1].text == "rows=3"


@pytest.mark.parametrize(("error", "tone"), [(0.999, ""), (1.0, ""), (1.001, "bad"), (9.0, "bad"), (None, "bad")])
def test_what_is_over_its_limit_is_red(error: float | None, tone: str) -> None:
    (table,) = records.fuzz([("f.json", {**FUZZ, "worst": {"k": error}, "failures": []})]).tables
    assert table.rows[0][1].tone == tone


def test_what_failed_or_does_not_hold_is_red() -> None:
    failed = {"variant": "k", "longest": 1, "cases": 7, "worst": 1e-3}
    (table,) = records.parity([{"grid": [{**failed, "failed": ["one"]}, {**failed, "failed": []}]}]).tables
    assert [(row[-1].text, row[-1].tone) for row in table.rows] == [("1", "bad"), ("0", "")]
    fresh = measured("verify_mma")
    stale = replace(fresh, digests=dict.fromkeys(fresh.digests or (), "0"))
    closed = replace(fresh, verdict=Verdict(False, "slow"))
    (table,) = records.evidence([fresh, stale, closed]).tables
    at = [list(table.columns).index(name) for name in ("sources", "verdict")]
    assert [tuple((row[i].text, row[i].tone) for i in at) for row in table.rows] == [
        (("fresh", ""), ("admitted", "good")),
        (("stale", "bad"), ("admitted", "good")),
        (("fresh", ""), ("not admitted", "bad")),
    ]


def test_the_route_map_is_what_admit_decides() -> None:
    found = route_map.route_map().map
    assert found is not None
    for rows, cells in found["maps"]["gfx1100"]["256"]:
        first = int(rows.split()[0].rstrip("+"))
        for ctx, (route, reason) in zip(found["contexts"], cells, strict=True):
            request = AttendRequest(
                arch="gfx1100", kv_format="q8_0", head_dim=256, n_heads=24, n_kv_heads=4, rows=first, logical_ctx=ctx,
                layout="chain", capturing=False, recording=False,
            )  # fmt: skip
            assert admit(request).route == route
            assert f"not {route}:" not in found["reasons"][reason]
            assert (route == "rows8") == ("not rows8:" not in found["reasons"][reason])
    labels = [rows for rows, _ in found["maps"]["gfx1100"]["256"]]
    assert labels[0].startswith("1")
    assert labels[-1] == "33+"


def test_what_stands_above_says_what_it_belongs_to(files: dict[str, Path]) -> None:
    shown = of(files["table"], files["peers"], files["evidence"], files["build"], files["runs"], files["fuzz"])
    assert html.about(shown) == [
        ("Routes", "Card <1>, driver 1.2, nvrtc 1, 2026-01-02"),
        ("Other libraries", "Card <1>, nvrtc 1, torch 2.9, 2026-01-02"),
        ("Evidence, reported", "gfx1100"),
        ("Resources", "gfx1100: clang 1"),
        ("A/B pairs", "Card, driver 1.2, nvrtc 13.0, 2026-01-02"),
        ("Fuzzing", "NVIDIA H200 (driver 580.1), 2026-01-03"),
        ("Fuzzing", "host, 2026-01-03"),
    ]
    found = of()
    found.evidence += [measured("verify_mma"), measured("verify_gqa")]
    assert html.about(found) == [("Evidence, measured", "sm_90, Card, driver 1, driver_api 2, nvrtc 13.0, 2026-01-04")]


@pytest.mark.parametrize(("x", "text"), [(2048, "2K"), (131072, "128K"), (20676, "20.7K"), (512, "512"), (0.5, "0.5")])
def test_counts_in_few_characters(x: float, text: str) -> None:
    assert short(x) == text


def test_numbers_in_few_characters() -> None:
    assert [plain(y) for y in (1e-5, 0.0015, 20, 1e-12, 2e6)] == ["1e-5", "0.0015", "20", "1e-12", "2e+6"]


# ---- plots ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> list[Section]:
    """The sections of what was recorded."""
    return html.sections(of(*SHOWN), None)


@needs_plots
def test_no_label_lies_on_another_or_on_a_curve(shown: list[Section]) -> None:
    """Inside the axes there is no text at all, around them no two labels touch, and none is cut off."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = [plot for section in shown for plot in section.plots]
    drawn += [run.plot for section in shown for run in section.runs if run.plot]
    assert len(drawn) > 15
    with rc_context(plots._style()):
        for plot in drawn:
            figure = plots.figure(plot)
            FigureCanvasAgg(figure).draw()
            (axes,) = figure.axes
            assert not axes.texts
            assert not figure.texts
            labels = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
            boxes = [(label.get_text(), label.get_window_extent()) for label in labels if label.get_text()]
            inside = axes.get_window_extent()
            boxes = [(text, box) for text, box in boxes if text in (plot.x, plot.y) or _within(box, inside)]
            whole = figure.bbox
            for i, (text, box) in enumerate(boxes):
                assert whole.x0 <= box.x0 < box.x1 <= whole.x1, (plot.title, text)
                assert whole.y0 <= box.y0 < box.y1 <= whole.y1, (plot.title, text)
                touched = [other for other, at in boxes[:i] if box.padded(1.5).overlaps(at.padded(1.5))]
                assert not touched, (plot.title, text, touched)


def _within(box: Any, axes: Any) -> bool:
    """Whether a tick is on the axis: matplotlib also has labels beyond its ends, which it does not draw."""
    middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
    return axes.x0 - 1 <= middle[0] <= axes.x1 + 1 or axes.y0 - 1 <= middle[1] <= axes.y1 + 1


@needs_plots
def test_a_ring_is_at_the_crossover_and_nowhere_else() -> None:
    line = plots.Line("a", 0, ((10.0, 1.0), (20.0, 2.0), (30.0, 3.0)), ("x", "y", "z"), crossover=20)
    for crossover, rings in ((20, [(20.0, 2.0)]), (None, []), (25, [])):
        plot = Plot("t", "x", "y", (replace(line, crossover=crossover),))
        (axes,) = plots.figure(plot).axes
        seen = [
            tuple(map(float, (drawn.get_xdata()[0], drawn.get_ydata()[0])))
            for drawn in axes.lines
            if drawn.get_markersize() == 10 and drawn.get_marker() == "o"
        ]
        assert seen == rings


@needs_plots
def test_series_beyond_the_colours_have_another_marker() -> None:
    seen = {(plots.series_colour(i), plots.marker(i)) for i in range(24)}
    assert len(seen) == 24
    line = plots.Line("a", 11, ((1.0, 1.0),), ("x",))
    (axes,) = plots.figure(Plot("t", "x", "y", (line,))).axes
    assert plots.marker(11) in [drawn.get_marker() for drawn in axes.lines]
    assert legend(Plot("t", "x", "y", (line,)))[0].shape == plots.MARKERS[plots.marker(11)]


# ---- widths ---------------------------------------------------------------------------------------------------------

TEMPLATE = (Path(html.__file__).parent / "page.html.j2").read_text(encoding="utf-8")
STYLE = TEMPLATE[TEMPLATE.index("<style>") : TEMPLATE.index("</style>")]
NARROW, CHARACTER, PADDING = 360, 7.4, 18
"""Pixels of a phone's page without its margins; of a character of a table, on average; left and right of a cell."""


def test_nothing_is_wider_than_a_phone_by_decree() -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in TEMPLATE
    free = re.sub(r"max-width:[^;}]*|minmax\(0, \d+px\)|min\(100%, \d+px\)", "", STYLE)
    wide = re.findall(r"(?:width|grid-template-columns|flex|flex-basis|inset|left|right):[^;}]*", free)
    assert wide
    assert not [rule for rule in wide for px in re.findall(r"(\d+)px", rule) if int(px) > NARROW]
    unbroken = {selector.strip() for selector in re.findall(r"([^{};]+)\{[^}]*nowrap", STYLE)}
    assert unbroken == {"nav a", "td.num", "#map th", "#map td button"}
    assert re.search(r"\.scroll \{ overflow-x: auto", STYLE)
    assert re.search(r"figure > svg \{[^}]*width: 100%", STYLE)
    for broken in ("td.prose", "dl", "#why", "footer"):
        assert re.search(rf"(?m)^{re.escape(broken)} \{{[^}}]*overflow-wrap: anywhere", STYLE), broken


def test_tables_fit_a_page_of_1200_pixels(shown: list[Section]) -> None:
    """By the longest word of each column; the column that is broken anywhere has at least 24 characters."""
    tables = [table for section in shown for table in section.tables]
    assert len(tables) >= 4
    assert {table.prose for table in tables} == {None, "why"}
    for table in tables:
        assert least_width(table) <= 1160, table.caption


def least_width(table: Table) -> float:
    widths = []
    for i, name in enumerate(table.columns):
        texts = [row[i].text for row in table.rows]
        words = texts if name in table.numeric else [word for text in texts for word in text.split()]
        longest = max(map(len, [*words, *name.split()]))
        widths.append(24 if name == table.prose else longest)
    return CHARACTER * sum(widths) + PADDING * len(widths)


# ---- the page -------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Elements, what they point to, and whether they nest."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.classes: list[str] = []
        self.loose: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [str(v) for n, v in attrs if n == "id"]
        self.links += [str(v) for n, v in attrs if n in ("href", "src", "action", "xlink:href")]
        if tag == "table" and "scroll" not in self.classes:
            self.loose.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
            self.classes.append(str(dict(attrs).get("class")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()
            self.classes.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag
        self.classes.pop()


@pytest.fixture(scope="module")
def page(files: dict[str, Path]) -> str:
    """The page of a file of each kind, by the command."""
    out = files["table"].with_name("report.html")
    argv = ["report", *map(str, files.values()), "--against", str(files["build"]), "--out", str(out)]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.stderr
    return out.read_text(encoding="utf-8")


@needs_plots
def test_the_page_is_whole_and_needs_no_network(page: str) -> None:
    found = _Page(page)
    assert found.open == []
    assert found.seen.count("table") > 5
    assert not found.loose, "a table outside of what scrolls"
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\((?!#)", page)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert len(page.encode()) < 1 << 20
    sections = {"speedup", "roofline", "error", "evidence", "resources", "routes", "ab", "parity", "fuzz"}
    assert sections <= set(found.ids)
    assert "Not shown, of no kind that it knows: other.json" in page


@needs_plots
def test_plots_take_the_colours_of_the_page(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) > 20, "plots, and a swatch for each entry of a legend"
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}|rgb\(|font-family", svg), "a colour of its own"
        used = set(re.findall(r"var\(--([\w]+)\)", svg))
        assert all(len(re.findall(rf"--{name}:", page)) == 2 for name in used), "one for light, one for dark"
    assert "<title>rows8, 8,192 keys: 2.00x (1.90 .. 2.10)</title>" in page
    assert not re.search(r"<svg[^>]*(width|height)=", page), "the page sizes it"


@needs_plots
def test_cards_of_a_narrow_page_name_what_they_show(page: str) -> None:
    cards = re.findall(r'<table class="sortable cards">.*?</table>', page, re.DOTALL)
    assert len(cards) == 2, "evidence and failures"
    for table in cards:
        assert table.count("<td") == table.count("data-name=") > 4


@needs_plots
def test_what_is_above_is_on_the_page(page: str) -> None:
    (above,) = re.findall(r'<dl class="about">.*?</dl>', page)
    assert "<dt>Routes</dt><dd>Card &lt;1&gt;, driver 1.2" in above
    assert "<dt>A/B pairs</dt><dd>Card, driver 1.2" in above


@needs_plots
def test_texts_of_results_are_escaped(page: str) -> None:
    assert "Card <1>" not in page
    assert "Card &lt;1&gt;" in page


@needs_plots
def test_the_same_results_make_the_same_page(files: dict[str, Path]) -> None:
    from hipfire_kernels.bench.report import page as make

    assert make([files["table"]]) == make([files["table"]])


def test_without_matplotlib_it_says_what_to_install(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(files["table"])])
    assert done.exit_code == 3
    assert "install hipfire-kernels[bench]" in done.stderr


@needs_plots
def test_files_that_are_no_results_make_no_page(files: dict[str, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(files["other"]), "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 2
    assert "none of other.json is a result" in done.stderr
    done = CliRunner().invoke(app, ["report", str(files["table"]), "--against", str(files["table"])])
    assert done.exit_code == 2
    assert "no build report" in done.stderr


def test_what_both_arms_of_a_run_had_set() -> None:
    shown = {"CUDA_HOME": "x", "HIPFIRE_CACHE_DIR": "sha256 02aa", "HIPFIRE_DFLASH_ADAPTIVE_B": "0"}
    document = {"variable": "route", "refused": "not run", "pinned": {"environment": {"shown": shown}}}
    (run,) = runs.runs([document]).runs
    assert ("set", "HIPFIRE_DFLASH_ADAPTIVE_B=0") in run.facts


def test_evidence_says_for_which_heads_it_is() -> None:
    found = [measured("verify_mma", heads) for heads in ((24, 4), (32, 8), (16, 2))]
    (table,) = records.evidence(found).tables
    at = list(table.columns).index("heads")
    assert {row[at].text for row in table.rows} == {"24/4", "32/8", "16/2"}
