"""What was recorded on a GPU: complete, bound to its sources, and in agreement with the host."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hipfire_kernels.dispatch import AttendRequest, admit, evidence
from hipfire_kernels.model import Engine, Tokenizer, demo_pair_path, demo_prompts, load_demo_pair

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def recorded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def test_every_file_has_a_line_in_the_readme() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([\w-]+\.json)`", text)) == {f.name for f in RESULTS.glob("*.json")}


def test_parity_on_the_card() -> None:
    found = recorded("h200-parity.json")
    assert sum(r["cases"] for r in found["grid"]) > 18_000
    assert not [r for r in found["grid"] if r["failed"]]
    assert all(r["worst"] <= 1e-5 for r in found["grid"] if "kv_cache" not in r["variant"])
    assert found["bits"]
    assert all(found["bits"].values())
    assert found["beyond_2_31"] < 1e-5
    assert {r["longest"] for r in found["grid"]} >= {4097, 32768, 131072}


def test_the_multirow_ratios_on_the_card() -> None:
    rows = recorded("h200-table.json")["rows"]
    for ctx in (20676, 32768):
        found = {r["route"]: r for r in rows if (r["ctx"], r["rows"], r["head_dim"]) == (ctx, 16, 256)}
        assert found["rows8"]["over_base_quartiles"][0] >= 2.3
        assert found["rows4"]["over_base_quartiles"][0] >= 1.9
    assert all(r["worst_error"] <= (1e-3 if r["route"] == "verify_mma" else 1e-5) for r in rows)


def test_a_shared_kv_head_is_read_faster_on_the_card() -> None:
    rows = recorded("h200-table.json")["rows"]
    for ctx in (2048, 4096, 20676, 32768, 131072):
        found = {r["route"]: r for r in rows if (r["ctx"], r["rows"], r["head_dim"]) == (ctx, 16, 256)}
        assert found["verify_gqa"]["over_base_quartiles"][0] >= 3
        assert found["verify_mma"]["over_base_quartiles"][0] >= 8


@pytest.mark.parametrize(("name", "arch"), [("host-fuzz.json", "host"), ("h200-fuzz.json", "sm_90")])
def test_fuzzing_left_no_variant_out_and_found_nothing(name: str, arch: str) -> None:
    found = recorded(name)
    assert (found["cases"], found["failures"], found["devices"][0]["arch"]) == (20_000, [], arch)
    assert (len(found["worst"]), found["left_out"]) == (218, [])
    assert max(found["worst"].values()) <= 1


def test_an_ab_run_has_a_verdict_only_where_the_interval_leaves_out_1() -> None:
    runs: list[Any] = json.loads((RESULTS / "h200-ab.json").read_text(encoding="utf-8"))
    assert {(run["mode"], run["variable"]) for run in runs} == {
        ("kernel", "kernel"), ("generate", "route"), ("generate", "HIPFIRE_VERIFY_GRAPH"),
    }  # fmt: skip
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for run in runs:
        low, high = run["judgement"]["interval"]
        assert run["refused"] is None
        assert run["judgement"]["pairs"] >= 12
        assert run["judgement"]["verdict"] is None or not low <= 1 <= high
        assert f"{run['judgement']['ratio']:.2f}" in text


def test_shipped_measured_evidence_is_fresh() -> None:
    """Whoever edits a template qualifies its routes anew on a card, or takes their records out."""
    assert {evidence.status(record) for record in evidence.shipped() if record.kind == "measured"} <= {"fresh"}


def test_the_multirow_routes_on_sm_90_open_by_that_evidence_alone() -> None:
    request = AttendRequest(
        arch="sm_90", kv_format="q8_0", head_dim=256, n_heads=24, n_kv_heads=4, rows=16, logical_ctx=20676,
        layout="chain", capturing=False, recording=False,
    )  # fmt: skip
    opened = [record for record in evidence.shipped() if (record.arch, record.route) == ("sm_90", "verify_mma")]
    assert admit(request).route == ("verify_mma" if opened else "tile_batched")
    with evidence.using([record for record in evidence.shipped() if record.arch != "sm_90"]):
        assert admit(request).route == "tile_batched"


def test_the_readme_shows_the_recorded_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in recorded("h200-table-quick.json")["rows"]:
        assert f"{row['us']:.0f}" in text, row


@pytest.mark.parametrize("index", range(11))
def test_tokens_of_the_card_are_the_hosts(index: int) -> None:
    target, draft = load_demo_pair()
    ids = Tokenizer(demo_pair_path() / "target").encode(demo_prompts()[index])
    found = recorded("h200-model.json")["prompts"][index]
    assert [int(t) for t in Engine(target, draft).generate(ids, max_new_tokens=64).tokens] == found["tokens"]
