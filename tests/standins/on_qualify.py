"""hfk qualify on hip:1, a gfx1201 without evidence: it opens the multi-row route, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import MUTANTS, _mutated_environment
from standin_lab import StandIn

import hipfire_kernels as hk
from hipfire_kernels import cli
from hipfire_kernels.authoring import templates
from hipfire_kernels.dispatch import AttendRequest, Decision, admit, evidence, measure
from hipfire_kernels.q8_0 import random_q8_0
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch

SMALL = measure.Settings(
    (256, 512, 1024), rounds=4, n_heads=4, n_kv_heads=1, parity_cases=6, parity_ctx=260, parity_long=0
)
ARGUMENTS = ["--device", "hip:1", "--route", "rows8", "--head-dim", "128", "--json"]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIPFIRE_EVIDENCE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "settings_for", lambda device, quick: SMALL)
    monkeypatch.setattr(Stopwatch, "FLUSH_BYTES", 1 << 16)
    evidence.forget()


def qualify(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and the one record."""
    with pytest.raises(SystemExit) as ended:
        cli.app(["qualify", *ARGUMENTS])
    (record,) = json.loads(capsys.readouterr().out)["records"]
    return int(ended.value.code or 0), record


def request(ctx: int) -> AttendRequest:
    return AttendRequest("gfx1201", "verify", "q8_0", 128, 4, 1, 16, ctx, "chain", False, False)


def attend(device: GpuDevice, ctx: int) -> Decision:
    rng = np.random.default_rng(0)
    k, v = (device.to_device(random_q8_0(rng, (ctx, 1, 4, 34))) for _ in range(2))
    q = device.to_device(rng.standard_normal((16, 4, 128), np.float32))
    seen: list[Decision] = []
    hk.attend(q, k, v, np.arange(ctx - 16, ctx, dtype=np.int32), on_decision=seen.append)
    return seen[0]


def test_closed_then_qualified_then_closed_by_an_edit(
    stub: StandIn, gpu1: GpuDevice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admit(request(8192)).route == "tile_batched"
    # 256 keys, 8 rows: 64 us against 50 + 8 * 4; 512 keys: 128 us against 50 + 16 * 4.
    stub.cost("rows8", 50, 4)
    stub.cost("tile_batched", 0, 1)
    code, record = qualify(capsys)
    assert code == 0
    assert record["device"] == "Stub Radeon"
    assert record["crossover"] == {"ctx": 512, "below": 256, "above": 1024}
    assert [(s["ctx"], s["rows"], s["ratio"]) for s in record["speed"]][:3] == [
        (256, 8, pytest.approx(64 / 82, abs=1e-3)),
        (256, 16, pytest.approx(128 / 114, abs=1e-3)),
        (512, 8, pytest.approx(128 / 114, abs=1e-3)),
    ]
    assert attend(gpu1, 513).route == "rows8"
    assert attend(gpu1, 512).route == "tile_batched"
    fault = next(m for m in MUTANTS if m.name == "row of the scatter off")
    edited = _mutated_environment(fault)
    monkeypatch.setattr(templates, "_environment", lambda folder: edited)
    evidence.forget()
    decision = admit(request(8192))
    assert decision.route == "tile_batched"
    assert "stale: the source of attention_flash_q8_0_rows8_d4 has changed" in decision.explain()


def test_a_slower_route_stays_closed(stub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    stub.cost("rows8", 0, 9)
    stub.cost("tile_batched", 0, 1)
    code, record = qualify(capsys)
    assert code == 1
    assert record["verdict"]["why"].startswith(
        "not faster than attention_flash_q8_0_tile_batched_d4 beyond noise: 0.89x"
    )
    assert "measured, not admitted: not faster than" in admit(request(8192)).explain()


def test_a_kernel_that_faults_stays_closed(stub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fail("launch", 719, after=5)
    code, record = qualify(capsys)
    assert code == 1
    assert record["parity"]["ok"] is False
    assert "hipModuleLaunchKernel failed: hipErrorLaunchFailure" in record["verdict"]["why"]
