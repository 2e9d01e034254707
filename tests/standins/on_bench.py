"""The benchmarks that need a card, every section at a size that the host runs in a moment: they run, their figures are
right where right has a meaning, and what is wrong fails them. What takes how long is made up."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch_like
from inputs import HEAD_DIM
from standin_lab import StandIn, make_ready, variants

import hipfire_kernels as hk
from hipfire_kernels import model
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.bench import draft, kernels, on_device, peers, tune
from hipfire_kernels.bench.kernels import Shape
from hipfire_kernels.checking.parity import Case, grid
from hipfire_kernels.dispatch import measure
from hipfire_kernels.running import binding
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch

KERNELS = Path(os.environ["STANDIN_KERNELS"])
SHAPE = Shape(300, 8, HEAD_DIM, 6, 1)


@pytest.fixture(autouse=True)
def small(stub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little flush; and a kernel is made ready when it is asked for."""
    build = binding.build

    def ready(variant: Variant, *args: Any) -> Any:
        if not (KERNELS / f"{variant.entry}.args").exists():
            make_ready(KERNELS, stub.face, variant)
        return build(variant, *args)

    for module in (binding, kernels, tune, measure):
        monkeypatch.setattr(module, "build", ready)
    monkeypatch.setattr(Stopwatch, "FLUSH_BYTES", 1 << 16)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Something like it, of which two rounds are enough."""
    timed = Stopwatch.interleaved
    monkeypatch.setattr(Stopwatch, "interleaved", lambda watch, calls, rounds: timed(watch, calls, 2, 1))
    found = torch_like.modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found["torch"]


@pytest.fixture
def section(gpu0: GpuDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs a section as the command does: its exit status, and what it leaves."""

    def run(name: str, *more: str) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as ended:
            on_device.main([name, "--device", gpu0.name, "--out", str(tmp_path), *more])
        assert f"-- {name}: " in capsys.readouterr().out
        return int(ended.value.code or 0), json.loads((tmp_path / f"{name}.json").read_text())

    return run


Section = Callable[..., tuple[int, Any]]


# ---- correctness ----------------------------------------------------------------------------------------------------


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the parity section: four variants, a case or two of each."""
    chosen = [v for v in variants() if "tree" not in v.entry and "rows8" not in v.entry][:4]
    monkeypatch.setattr(on_device, "variants", lambda: chosen)
    monkeypatch.setattr(on_device, "grid", lambda v: list(grid(v, rows=(5,), contexts=(129,)))[:2])
    monkeypatch.setattr(on_device, "LONG", (600,))
    monkeypatch.setattr(on_device, "FAR", 5000)
    rows8 = next(v for v in variants() if "rows8" in v.entry)
    families = {**hk.families(), "attention_flash_q8_0_rows": SimpleNamespace(variants=lambda: [rows8])}
    monkeypatch.setattr(on_device, "families", lambda: families)
    monkeypatch.setattr(on_device, "Case", lambda rows, ctx, *more, **named: Case(rows, min(ctx, 600), *more, **named))


def test_parity(little: None, section: Section) -> None:
    code, found = section("parity")
    assert code == 0
    assert found["bits"] == {"attention_flash_q8_0_rows8_d4": True}
    assert 0 < found["beyond_2_31"] < 1e-5
    assert found["matrix"] == []
    assert [report["failed"] for report in found["grid"]] == [[]] * len(found["grid"])
    assert max(report["longest"] for report in found["grid"]) == 600
    assert all(report["cases"] for report in found["grid"])


def test_parity_that_fails(little: None, section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that is wrong for the section with the longest contexts alone."""
    check = on_device.check

    def wrong(variant: Variant, case: Case, device: Any) -> Any:
        found = check(variant, case, device)
        return SimpleNamespace(ok=case.ctx < 600, error=found.error, describe=lambda: f"FAILED {variant.name}")

    monkeypatch.setattr(on_device, "check", wrong)
    code, found = section("parity")
    assert code == 1
    assert [line for report in found["grid"] for line in report["failed"]]


def test_sanitize(section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, want in (("echo ERROR SUMMARY: 0 errors", 0), ("exit 9", 1)):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        code, found = section("sanitize")
        assert code == want
        assert len(found) == len(on_device.SANITIZED)


def test_arrays(torch: Any, section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "GRAPH_CASE", Case(8, 300, 4, 2, HEAD_DIM))
    monkeypatch.setattr(on_device, "GRAPH_ROUTES", ("tile_batched",))
    monkeypatch.setattr(on_device, "Case", lambda *shape: Case(8, 140, 8, 2, 128))
    code, found = section("arrays")
    assert code == 0
    assert found.pop("torch_error") < 1e-5
    assert found == {"torch_kind": "Tensor", "torch_same_stream": True, "graph_is_direct": {"tile_batched": True}}


def test_model(section: Section, gpu0: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "NEW_TOKENS", 4)
    prompts = model.demo_prompts()
    monkeypatch.setattr(model, "demo_prompts", lambda: prompts[:1])
    code, found = section("model")
    assert code == 0
    assert found["device"] == gpu0.name
    (row,) = found["prompts"]
    assert len(row["tokens"]) == 4
    assert sum(row["routes"].values()) > 0


# ---- times ----------------------------------------------------------------------------------------------------------


def test_host_time(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "HOST_CASE", Case(8, 140, 6, 1, HEAD_DIM))
    monkeypatch.setattr(on_device, "TURNS", 2)
    code, found = section("host")
    assert code == 0
    planned = {"plan_run_us", "two_launches_us", "two_cuda_bindings_launches_us"}
    assert set(found) == planned | {"callable_us", "bound_us", "one_launch_us"}
    assert min(found.values()) > 0


def test_table(section: Section, stub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 300 keys and 8 rows of 6 heads: 3 tiles, 144 blocks of the tile kernel, 6 heads x 3 tiles of rows8."""
    monkeypatch.setattr(kernels, "CONTEXTS", (SHAPE.ctx,))
    monkeypatch.setattr(kernels, "Shape", lambda c, b, d: Shape(c, 8, HEAD_DIM, 6, 1))
    table = kernels.table
    monkeypatch.setattr(kernels, "table", lambda device, shapes, rounds: table(device, shapes, 4))
    for part, us in (("tile_batched", 8), ("rows8", 2), ("rows4", 4), ("bench_read", 1), ("mma", 1), ("gqa", 16)):
        stub.cost(part, us, 0)
    code, found = section("table", "--quick")
    assert code == 0
    assert {name: found[name] for name in ("device", "arch", "compiler")} == {
        "device": "cuda:0", "arch": "sm_90", "compiler": "nvrtc 13.0",
    }  # fmt: skip
    rows = {row["route"]: row for row in found["rows"]}
    assert {name: row["us"] for name, row in rows.items()} == pytest.approx(
        {"tile_batched": 8, "rows4": 4, "rows8": 2, "verify_gqa": 16, "verify_mma": 1}, rel=1e-3
    )
    assert {name: row["over_base"] for name, row in rows.items()} == pytest.approx(
        {"tile_batched": 1, "rows4": 2, "rows8": 4, "verify_gqa": 0.5, "verify_mma": 8}, rel=1e-2
    )
    assert rows["rows8"]["share_of_read"] == pytest.approx(0.5, rel=1e-2)
    assert rows["tile_batched"]["kv_gb_per_s"] == pytest.approx(SHAPE.kv_bytes / 8e3, rel=0.1)
    assert max(row["worst_error"] for row in rows.values()) < 1e-3
    assert kernels.describe(rows["rows8"]).startswith("d128 B8  ctx 300    rows8 ")
    named = found["sources"]
    assert "attention_flash_reduce_batched_d4" in named
    assert all(named.values())


def test_draft(torch: Any, section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    found = draft.candidates()
    assert all(variant.head_dim == HEAD_DIM and not variant.sliding for variant, _ in found.values())
    assert {splits for _, splits in found.values()} == {None, *draft.SPLITS}
    n64 = "attention_dflash_wmma_n64_f32_f16kv"
    chosen = {"attention_dflash_f32_d4", n64, f"{n64} S8"}
    monkeypatch.setattr(draft, "candidates", lambda: {n: found[n] for n in found if n in chosen})
    monkeypatch.setattr(draft, "KEYS", (80,))
    monkeypatch.setattr(draft, "HEADS", 4)
    monkeypatch.setattr(draft, "KV_HEADS", 2)
    code, made = section("draft")
    assert code == 0
    assert {row["who"] for row in made["rows"]} == {*chosen, "torch_sdpa_flash"}
    assert all(row["worst_error"] < 2e-3 for row in made["rows"])
    assert made["torch"] == "2.0 of a test"


def test_peers(torch: Any, section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them refuses; those that run are right, from the very cache that the library's own kernels read."""
    monkeypatch.setattr(peers, "QUICK_CONTEXTS", (150,))
    monkeypatch.setattr(peers, "Shape", lambda ctx, rows, head_dim: Shape(ctx, 8, HEAD_DIM, 6, 1))
    code, found = section("peers", "--quick")
    assert code == 0
    timed = {row["who"]: row["worst_error"] for row in found["rows"] if "us" in row}
    assert set(timed) == {*kernels.ROUTES, "sdpa_flash", "sdpa_efficient", "flex", "flashinfer"}
    assert max(timed.values()) < 1e-3
    assert [row["refused"] for row in found["rows"] if "refused" in row] == ["No available kernel. Aborting execution."]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert str(peers._flashinfer(torch, SHAPE, None, [], None)).startswith("not installed: ")


def test_every_section_is_run_here_or_in_test_ab(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(on_device.ab_card, "on_card", lambda device, parts: asked.append(parts) or {"parts": parts})
    for name in on_device.AB:
        assert section(name)[0] == 0
    assert asked == [(name.removeprefix("ab-"),) for name in on_device.AB]
    here = {name.removeprefix("test_") for name in globals()} | {"host"}
    assert set(on_device.SECTIONS) - set(on_device.AB) <= here


def test_the_host_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        on_device.main(["host", "--device", "host", "--out", str(tmp_path)])
    assert "host is no GPU" in capsys.readouterr().err


# ---- tuning ---------------------------------------------------------------------------------------------------------


def test_tune(gpu0: GpuDevice, stub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two numbers of splits the card is made to prefer the one that is not the default."""
    monkeypatch.setattr(tune, "HELD_CTX", 150)
    assert tune.shapes_for(gpu0, "verify").heads == (24, 4)
    assert tune.shapes_for(gpu0, "draft").heads == (32, 8)
    (row,) = tune.tunable(["attention_verify_gqa_q8"])
    question, *_ = tune.questions(row, gpu0, tune.Shapes((HEAD_DIM,), (6, 1), (8,), (256,)))
    listed = tune.candidates(question, gpu0, {})[:2]
    monkeypatch.setattr(tune, "candidates", lambda *_: listed)
    default, other = (dict(values)["splits"] for values in listed)
    assert other < default
    stub.cost("verify_gqa", 20, 1)  # us, and us a block: fewer splits are faster
    seen: list[str] = []
    (answer,) = tune.tune(gpu0, [question], seen.append)
    assert seen == ["attention_verify_gqa_q8 d128 B8 ctx 256"]
    assert answer.faults == []
    assert answer.record is not None
    assert answer.record.choice == {"splits": other}
    assert (answer.record.device, answer.record.arch) == ("Stub Hopper", "sm_90")
    assert answer.means[listed[1]] > 1
    assert np.isfinite(answer.record.gains[0].ratio)
