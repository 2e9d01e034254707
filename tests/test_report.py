"""The report: one page that needs nothing else, made of every kind of result."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hipfire_kernels.bench import report_data, report_records, report_routes, report_sections
from hipfire_kernels.bench.kernels import BASE
from hipfire_kernels.bench.report_data import Series
from hipfire_kernels.bench.report_plots import short
from hipfire_kernels.cli import app
from hipfire_kernels.dispatch import AttendRequest, admit, evidence
from hipfire_kernels.errors import InputError

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
RUN = {
    "kind": "ab",
    "mode": "kernel",
    "variable": "kernel",
    "arms": {"off": "tile_batched", "on": "rows8", "ar": "1 row"},
    "date": "2026-01-02T00:00:00+00:00",
    "pinned": {"code": "abc", "machine": {"device": "Card"}, "shape": {"ctx": 8192, "rows": 16, "head_dim": 256}},
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
    evidence = Path(report_sections.__file__).parent.parent / "dispatch" / "evidence" / "gfx1100.json"
    build = {"kernels": [full(k) for k in BUILD["kernels"]]}
    contents = {"table": TABLE, "peers": PEERS, "runs": [RUN, {**RUN, "refused": "tokens differ", "judgement": None}]}
    contents |= {"build": build, "parity": PARITY, "fuzz": FUZZ, "other": {"something": 1}}
    found = {name: folder / f"{name}.json" for name in contents}
    for name, value in contents.items():
        found[name].write_text(json.dumps(value), encoding="utf-8")
    return {**found, "evidence": evidence}


# ---- reading --------------------------------------------------------------------------------------------------------


def test_files_are_told_apart_by_what_they_hold(files: dict[str, Path]) -> None:
    found = report_data.read(files.values())
    assert [len(part) for part in (found.tables, found.peers, found.builds, found.parity, found.fuzz)] == [1] * 5
    assert len(found.runs) == 2
    assert {r.arch for r in found.evidence} == {"gfx1100"}
    assert found.passed_over == ["other.json"]


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    broken = tmp_path / "a.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.json is no JSON"):
        report_data.read([broken])
    with pytest.raises(InputError, match="cannot be read"):
        report_data.read([tmp_path / "none.json"])


# ---- what the parts say ---------------------------------------------------------------------------------------------


def test_the_crossover_is_the_one_that_evidence_has(files: dict[str, Path]) -> None:
    """The first context from which on the lower quartile stays above 1: 4096 has a ratio of 1.2 and is not it."""
    (plot,) = report_sections.speedup(report_data.read([files["table"]]), Series([BASE, "rows8"])).plots
    assert plot.marks == ((8192.0, "rows8 from 8,192", 1),)
    assert [line.name for line in plot.lines] == ["rows8"]
    assert plot.lines[0].points == ((2048.0, 0.8), (4096.0, 1.2), (8192.0, 2.0))


def test_the_roofline_has_a_floor_and_other_libraries_with_their_own_bytes(files: dict[str, Path]) -> None:
    results = report_data.read([files["table"], files["peers"]])
    (plot,) = report_sections.roofline(results, Series([BASE, "rows8"])).plots
    own, peer = (next(line for line in plot.lines if line.name == name) for name in ("rows8", "sdpa_flash"))
    assert plot.floor is not None
    assert own.points[-1][0] == plot.floor[0][-1][0] == 2 * 8192 * 4 * 8 * 34 / 1e6
    assert peer.points[0][0] == pytest.approx(own.points[-1][0] * 64 / 34)
    assert peer.hollow
    assert {line.name for line in plot.lines} == {BASE, "rows8", "sdpa_flash"}


def test_errors_have_the_limit_of_the_kernels(files: dict[str, Path]) -> None:
    (plot,) = report_sections.error(report_data.read([files["table"]]), Series([BASE, "rows8"])).plots
    assert plot.levels == ((1e-5, "limit 1e-05"),)


def test_reported_speeds_are_shown_where_nothing_was_measured(files: dict[str, Path]) -> None:
    plots = report_sections.speedup(report_data.read([files["evidence"]]), Series([BASE, "rows4", "rows8"])).plots
    assert plots
    assert all("gfx1100" in plot.title and "reported" in plot.title for plot in plots)
    assert {line.name for line in plots[0].lines} == {"rows4", "rows8"}


def test_changes_of_resources_and_what_is_in_memory(files: dict[str, Path]) -> None:
    before = json.loads(json.dumps({"kernels": [full(BUILD["kernels"][0])]}))
    before["kernels"][0]["resources"] |= {"vgprs": 112, "occupancy": 12}
    builds = report_data.read([files["build"]]).builds
    changed, whole = report_records.resources(builds, before).tables
    assert [row[1].text for row in changed.rows] == ["VGPR 112 \u2192 104", "new"]
    assert changed.rows[0][1].tone == "good"
    scratch = list(whole.columns).index("scratch B")
    assert [row[scratch].tone for row in whole.rows] == ["", "bad"]


def test_ab_runs_without_times_say_why(files: dict[str, Path]) -> None:
    judged, refused = report_records.runs(report_data.read([files["runs"]]).runs).runs
    assert judged.verdict.startswith("on is faster")
    assert judged.plot is not None
    assert judged.plot.band == (1.4, 1.6)
    assert (refused.verdict, refused.plot, refused.shown) == ("no times: tokens differ", None, False)


def test_fuzz_campaigns(files: dict[str, Path]) -> None:
    worst, failures = report_records.fuzz(report_data.read([files["fuzz"]]).fuzz).tables
    assert "20,000 drawn cases in 60 s on NVIDIA H200 (driver 580.1), host, 1 failures" in worst.caption
    assert [(row[0].text, row[1].text, row[1].tone) for row in worst.rows] == [
        ("broken", "inf", "bad"),
        ("k", "0.250", ""),
    ]
    assert failures.rows[0][1].text == "rows=3"


def test_the_route_map_is_what_admit_decides() -> None:
    found = report_routes.route_map().map
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


@pytest.mark.parametrize(("x", "text"), [(2048, "2K"), (131072, "128K"), (20676, "20.7K"), (512, "512"), (0.5, "0.5")])
def test_counts_in_few_characters(x: float, text: str) -> None:
    assert short(x) == text


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
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [str(v) for n, v in attrs if n == "id"]
        self.links += [str(v) for n, v in attrs if n in ("href", "src", "action", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


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
    assert len(svgs) > 4
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}|rgb\(|font-family", svg), "a colour of its own"
        used = set(re.findall(r"var\(--([\w]+)\)", svg))
        assert all(len(re.findall(rf"--{name}:", page)) == 2 for name in used), "one for light, one for dark"
    assert "<title>rows8, 8,192 keys: 2.00x (1.90 .. 2.10)</title>" in page


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
    (run,) = report_records.runs([document]).runs
    assert ("set", "HIPFIRE_DFLASH_ADAPTIVE_B=0") in run.facts


def test_evidence_says_for_which_heads_it_is() -> None:
    records = [r for r in evidence.shipped() if (r.arch, r.route, r.shape.head_dim) == ("sm_90", "verify_mma", 256)]
    (table,) = report_records.evidence(records).tables
    at = list(table.columns).index("heads")
    assert {row[at].text for row in table.rows} == {"24/4", "32/8", "16/2"}
