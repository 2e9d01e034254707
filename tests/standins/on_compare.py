"""Times of two kernels, and of two builds of one, in one interleaved run on a GPU; and `hfk diff` there."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from standin_lab import StandIn

from hipfire_kernels import build, cli, families
from hipfire_kernels.inspecting import compare, revision
from hipfire_kernels.running.devices.gpu import GpuDevice
from hipfire_kernels.running.timing import Stopwatch

ROWS8 = families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=128)
TILE = families()["attention_flash_q8_0_tile_batched"].variant(head_dim=128, mask="causal")


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "FLUSH_BYTES", 1 << 16)


def test_times(stub: StandIn, gpu0: GpuDevice) -> None:
    stub.cost("rows8", 50, 4)
    stub.cost("tile_batched", 0, 1)
    sides = {v.entry: compare.Build(v, build(v, "gfx1100", gpu0.toolchain)) for v in (ROWS8, TILE)}
    times = compare.times(sides, compare.timing_case(ROWS8, 16, 256), gpu0, rounds=4)
    # 12 heads, 2 tiles; 2 groups of rows against 16 rows.
    assert [taken.median for taken in times.values()] == [pytest.approx(50 + 48 * 4), pytest.approx(384)]
    assert "launch" not in vars(gpu0)


def test_parity_and_time_of_another_build(stub: StandIn, gpu0: GpuDevice) -> None:
    now = revision.current(ROWS8.entry, ["gfx1100"])
    again = build(dataclasses.replace(now, sources={"gfx1100": now.source("gfx1100")}), "gfx1100", gpu0.toolchain)
    case = compare.timing_case(ROWS8, 8, 128)
    (result,) = compare.parity(compare.Build(ROWS8, again), [case], gpu0)
    assert result.ok
    assert np.isfinite(result.error)


def test_diff(gpu0: GpuDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = compare.timing_case(TILE, 8, 128)
    monkeypatch.setattr(compare, "timing_case", lambda variant, rows, ctx: shorter)
    with pytest.raises(SystemExit) as ended:
        cli.app(["diff", ROWS8.entry, TILE.entry, "--device", gpu0.name, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert [side["parity"]["failures"] for side in found["sides"]] == [[], []]
    assert set(found["times"]) == {"A", "B"}
