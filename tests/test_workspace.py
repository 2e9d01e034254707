"""What a call takes of the device's memory is known before it is admitted, and asked for before it is touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from route_lab import opened
from typer.testing import CliRunner

import hipfire_kernels as hk
from hipfire_kernels.cli import app
from hipfire_kernels.dispatch import AttendRequest, Check, admit, policy, tuning
from hipfire_kernels.errors import DeviceError, InputError, NotAdmitted
from hipfire_kernels.running.devices import memory
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.draft import DraftWorkspace

GIB = 1 << 30
VERIFY = AttendRequest(
    arch="host", kv_format="q8_0", head_dim=128, n_heads=4, n_kv_heads=2, rows=5, logical_ctx=1000, layout="chain",
    capturing=False, recording=False, multiprocessors=8,
)  # fmt: skip
DRAFT = dataclasses.replace(VERIFY, workload="draft", kv_format="f32")


def price(request: AttendRequest, route: str = "auto") -> Check:
    decision = admit(request, route_name=route)
    (found,) = (check for check in decision.checks[str(decision.route)] if check.name == "workspace bytes")
    return found


@pytest.mark.parametrize(
    ("changes", "rows", "records"),
    [
        ({}, 5, 8),
        ({"logical_ctx": 1025}, 5, 9),  # no more than the positions that the cache is known to have
        ({"logical_ctx": 1025, "capacity": 1200}, 5, 10),
        ({"logical_ctx": 1025, "capacity": 9000}, 5, 16),  # tiles by a power of two
        ({"logical_ctx": 1025, "capacity": 9000, "capturing": True}, 5, 71),
        ({"logical_ctx": 1025, "capacity": 9000, "recording": True}, 5, 71),
        ({"rows": 100}, 16, 8),
        ({"logical_ctx": 0}, 5, 1),
    ],
)
def test_records_of_tiles_are_priced(changes: dict[str, Any], rows: int, records: int) -> None:
    asked = dataclasses.replace(VERIFY, **changes)
    assert price(asked).observed == 4 * rows * 4 * records * (2 + 128)


def test_the_policy_is_in_the_price() -> None:
    with policy.override(partials_rows=3):
        assert price(VERIFY).observed == 4 * 3 * 4 * 8 * (2 + 128)


@pytest.mark.parametrize(
    ("route", "changes", "numbers"),
    [
        ("verify_gqa", {}, 5 * 4 * 4),
        ("verify_gqa", {"rows": 32, "logical_ctx": 10**6}, 32 * 4 * 4),
        ("verify_mma", {"multiprocessors": 132}, 5 * 4 * 66),
        ("verify_mma", {"multiprocessors": None}, 5 * 4 * 128),
        ("wmma_prefill", {"logical_ctx": 10**6}, 0),
        ("rows4", {}, 5 * 4 * 8),
        ("dflash_n64", {}, 5 * 4 * 8),
        ("dflash_n64", {"rows": 1000}, 1000 * 4 * 8),
        ("dflash_m16", {}, 0),
        ("dflash_scalar", {}, 0),
    ],
)
def test_every_kind_of_route_is_priced(route: str, changes: dict[str, Any], numbers: int) -> None:
    base = DRAFT if route.startswith("dflash") else VERIFY
    with opened(128, 4, 2):
        assert price(dataclasses.replace(base, **changes), route).observed == 4 * numbers * (2 + 128)


@pytest.mark.parametrize("route", ["tile_batched", "rows4", "verify_gqa", "wmma_prefill"])
def test_the_price_is_what_a_plan_holds(route: str, host: Any) -> None:
    with opened(128, 4, 2):
        plan = hk.plan(VERIFY, host, route=route)
        assert plan.workspace_bytes == price(VERIFY, route).observed


@pytest.mark.parametrize("route", ["verify_gqa", "dflash_n64"])
def test_a_tuning_is_in_the_price(route: str, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuning.Choice({"splits": 7}, "a test")
    monkeypatch.setattr(tuning, "find", lambda family, request: chosen if family.records == "split" else None)
    with opened(128, 4, 2):
        asked = DRAFT if route == "dflash_n64" else VERIFY
        assert price(asked, route).observed == 4 * 5 * 4 * 7 * (2 + 128)
        if asked is VERIFY:
            assert hk.plan(asked, host, route=route).workspace_bytes == price(asked, route).observed


def test_the_price_is_what_a_draft_holds(host: Any) -> None:
    with opened(128, 4, 2):
        priced = price(DRAFT, "dflash_n64").observed
    held = DraftWorkspace()
    variant = hk.families()["attention_dflash_wmma_n64_f32"].variant(head_dim=128, kv="f32", sliding=False)
    held.make(variant, host, 5, 4, 2)
    assert held.partials.nbytes == priced


LONG = dataclasses.replace(VERIFY, logical_ctx=1 << 30, n_heads=24, n_kv_heads=4, rows=16)
NEEDED = 4 * 16 * 24 * (1 << 23) * (2 + 128)


def test_what_can_never_fit_is_not_admitted() -> None:
    """2**30 keys: 1.7 TB of records."""
    decision = admit(dataclasses.replace(LONG, memory=24 * GIB))
    assert decision.route is None
    (check,) = decision.rejected["tile_batched"]
    assert (check.name, check.observed) == ("workspace bytes", NEEDED)
    for text in (str(NEEDED), str(24 * GIB), "shorter context or fewer rows", "HIPFIRE_FLASH_PARTIALS_BATCH"):
        assert text in decision.explain()
    assert admit(dataclasses.replace(LONG, memory=NEEDED)).route == "tile_batched"
    assert admit(dataclasses.replace(LONG, memory=NEEDED - 1)).route is None
    assert admit(LONG).route == "tile_batched"  # on a device that nobody knows
    assert f"workspace bytes: {NEEDED}" in admit(LONG).explain()


def test_a_route_without_records_takes_what_no_other_can() -> None:
    with opened(128, 24, 4):
        decision = admit(dataclasses.replace(LONG, memory=24 * GIB))
    assert decision.route in ("verify_mma", "verify_gqa", "wmma_prefill")
    assert [check.name for check in decision.rejected["tile_batched"]] == ["workspace bytes"]
    assert decision.fallback != "tile_batched"


@pytest.mark.parametrize("value", [-1, 2.5, "77", True], ids=repr)
@pytest.mark.parametrize("field", ["capacity", "memory"])
def test_a_size_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    decision = admit(dataclasses.replace(VERIFY, **{field: value}))
    assert decision.route is None
    (check,) = decision.rejected["tile_batched"]
    assert (check.name, check.observed) == (field, value)


def test_a_plan_and_a_call_know_their_device(host: Any) -> None:
    with pytest.raises(NotAdmitted, match=r"workspace bytes: [0-9]+, required at most [0-9]+, the memory"):
        hk.plan(LONG, host)
    device = HostDevice()
    device.memory_bytes = 20_000
    q, cache = np.zeros((5, 4, 128), np.float32), np.zeros((1000, 2, 4, 34), np.uint8)
    call = {"q": q, "k_cache": cache, "v_cache": cache.copy(), "positions": np.arange(995, 1000, dtype=np.int32)}
    with pytest.raises(NotAdmitted, match="workspace bytes: 83200, required at most 20000"):
        hk.attend(**call, device=device)
    with pytest.raises(NotAdmitted, match="workspace bytes: 83200, required at most 20000"):
        hk.plan(VERIFY, device)
    k = np.zeros((50, 2, 128), np.float32)
    with opened(128, 4, 2), pytest.raises(NotAdmitted, match="workspace bytes: 83200, required at most 20000"):
        hk.draft_attend(q, k, k, device=device, route="dflash_n64")


def test_explain_shows_it() -> None:
    done = CliRunner().invoke(app, ["explain", "--arch", "gfx1201", "--ctx", "20676"])
    assert not done.exit_code
    needed = 4 * 16 * 24 * 162 * (2 + 256)
    assert f"workspace bytes: {needed}, required the memory of the device" in done.output
    assert any(line.split()[:3] == ["workspace", "bytes", str(needed)] for line in done.output.splitlines())


# ---- what is left ----------------------------------------------------------------------------------------------------


def test_the_host_does_not_hand_out_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would: it ends a process when it touches what nobody has."""
    device = HostDevice()
    monkeypatch.setattr(memory, "available", lambda: GIB)
    with pytest.raises(DeviceError, match=r"1,073,741,828 bytes are not there for host: 1,073,741,824 are left. Free"):
        device.empty((GIB // 4 + 1,), np.float32)
    assert device.empty((GIB // 4,), np.float32).nbytes == GIB
    with pytest.raises(DeviceError, match="are not there for host: 1,073,741,824 are left"):
        device.empty((1 << 60,), np.uint8)
    monkeypatch.setattr(memory, "available", lambda: 1 << 62)
    with pytest.raises(DeviceError, match="bytes are not there for host: Unable to allocate"):
        device.empty((1 << 61,), np.uint8)


def test_a_plan_for_which_nothing_is_left_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 80 << 20)
    monkeypatch.setattr(memory, "total", lambda: 1 << 40)
    large = dataclasses.replace(VERIFY, rows=16, logical_ctx=2_000_000)
    with pytest.raises(DeviceError, match=r"520,000,000 bytes are not there for host: 83,886,080 are left"):
        hk.plan(large, HostDevice())


def group(folder: Path, **files: Any) -> None:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "free", "total", "left"),
    [
        (None, 0, 0, 5 * GIB, None, 5 * GIB),
        ("max", 4 * GIB, 0, 5 * GIB, None, 5 * GIB),
        (GIB, GIB // 2, 0, 5 * GIB, GIB, GIB // 2),
        (GIB, GIB // 2, GIB // 4, 5 * GIB, GIB, 3 * GIB // 4),  # caches can be given up
        (GIB, GIB // 2, 0, GIB // 8, GIB, GIB // 8),
        (GIB, 2 * GIB, 0, 5 * GIB, GIB, 0),
        (1 << 50, 0, 0, 5 * GIB, None, 5 * GIB),
    ],
)
def test_memory_is_the_machines_or_the_containers(
    limit: Any, used: int, inactive: int, free: int, total: int | None, left: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    machine = memory.total()
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:  {free // 1024} kB\n")
    if limit is not None:
        group(tmp_path, max=limit, current=used, stat=f"anon 5\ninactive_file {inactive}\nactive_file 7")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_machine", lambda: 16 * GIB)
    assert memory.total() == (16 * GIB if total is None else total)
    assert memory.available() == left
    assert machine > 0


def test_where_nobody_says_what_is_left_all_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_machine", lambda: 16 * GIB)
    assert memory.available() == 16 * GIB


def test_what_the_host_has_is_a_size_of_this_machine(host: Any) -> None:
    assert 0 < memory.available() <= memory.total() == host.memory_bytes
    with pytest.raises(InputError, match="capacity is -1"):
        hk.plan(VERIFY, host, capacity=-1)
