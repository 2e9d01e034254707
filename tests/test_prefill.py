"""Prefill attention on matrix units: against the float64 oracle, under each GPU's lane map, and through its route."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from matrix_lab import MAPS, map_device
from test_evidence import record as measured_record

import hipfire_kernels as hk
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import VALUES, Case, inputs, run_attend
from hipfire_kernels.checking.reference import attend as reference_attend
from hipfire_kernels.dispatch import AttendRequest, admit, evidence
from hipfire_kernels.dispatch.record import SCHEMA, Crossover, load
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device

FAMILY = hk.families()["attention_q8_0_flash_prefill_wmma"]
VARIANTS = tuple(FAMILY.variants())


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_rows_contexts_and_groups(v: Variant, host: Device) -> None:
    """Rows that fill groups of 16 and do not, contexts that fill tiles and do not, rows that see nothing."""
    for rows in (1, 2, 15, 16, 17, 31, 40):
        for group, ctx in ((1, 1), (4, 16), (6, 17), (1, 33), (4, 129), (6, 300)):
            result = check(v, Case(rows, ctx, 2 * group, 2, v.head_dim, seed=rows * 100 + ctx), host)
            assert result.ok, result.describe()


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("values", [name for name in VALUES if name != "normal"])
def test_contents(v: Variant, values: str, host: Device) -> None:
    result = check(v, Case(20, 230, 8, 2, v.head_dim, values, seed=3), host)
    assert result.ok, result.describe()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_no_lane_map_is_taken_for_granted(name: str, v: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    device = map_device(monkeypatch, name)
    for case in (Case(5, 70, 8, 2, v.head_dim, seed=1), Case(20, 129, 6, 1, v.head_dim, "foreign", seed=2)):
        result = check(v, case, device)
        assert result.ok, result.describe()


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_the_order_of_the_threads_does_not_matter(v: Variant, host: Device) -> None:
    case = Case(21, 130, 6, 1, v.head_dim)
    first, _ = run_attend(v, case, host)
    for seed in range(3):
        assert np.array_equal(run_attend(v, case, HostDevice(thread_order=seed))[0], first)


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_a_row_has_the_same_bits_in_any_company(v: Variant, host: Device) -> None:
    case = Case(20, 200, 4, 2, v.head_dim, seed=5)
    whole, _ = run_attend(v, case, host)
    for start, count in ((0, 1), (7, 1), (19, 1), (3, 4), (5, 15), (4, 16)):
        part, _ = run_attend(v, case, host, slice(start, start + count))
        assert np.array_equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_nan_behind_a_rows_bound_stays_behind(v: Variant, host: Device) -> None:
    """Rows of one group see different keys; what only later rows see may be NaN without the earlier ones knowing. The
    later ones come out as NaN."""
    case = Case(16, 140, 2, 1, v.head_dim, seed=11)
    clean, _ = run_attend(v, case, host)
    i = inputs(case)
    for caches, row in (("kv", 3), ("k", 8), ("v", 0), ("v", 14)):
        first = int(i.positions[row]) + 1
        kept = i.k_cache[first:].copy(), i.v_cache[first:].copy()
        for name, cache in (("k", i.k_cache), ("v", i.v_cache)):
            if name in caches:
                cache[first:, ..., :2] = 0x7E
        try:
            spoiled, _ = run_attend(v, case, host)
        finally:
            i.k_cache[first:], i.v_cache[first:] = kept
        assert np.array_equal(spoiled[: row + 1], clean[: row + 1])
        assert np.isnan(spoiled[row + 1 :]).all()


def test_rows_of_any_positions(host: Device) -> None:
    v = FAMILY.variant(head_dim=128)
    i = inputs(Case(6, 200, 4, 2, 128, seed=2))
    positions = np.array([150, 3, -1, 199, 0, 64], np.int32)
    out = np.full(i.q.shape, np.nan, np.float32)
    plan = verify_plan(v, host, check_verify(host, i.q, i.k_cache, i.v_cache), 200)
    plan.run(i.q, i.k_cache, i.v_cache, positions, out)
    assert worst_row(out, reference_attend(i.q, i.k_cache, i.v_cache, positions)) < 1e-3
    assert not out[2].any()
    assert plan.workspace_bytes == 0
    assert len(plan.launches) == 1


def test_a_row_that_sees_more_than_the_launch_covers_is_nan(host: Device) -> None:
    v = FAMILY.variant(head_dim=128)
    i = inputs(Case(6, 200, 4, 2, 128, seed=2))
    out = np.zeros(i.q.shape, np.float32)
    plan = verify_plan(v, host, check_verify(host, i.q, i.k_cache, i.v_cache), 200)
    plan.run(i.q, i.k_cache, i.v_cache, i.positions, out, ctx=198)
    want = reference_attend(i.q, i.k_cache, i.v_cache, i.positions)
    assert worst_row(out[:4], want[:4]) < 1e-3
    assert np.isnan(out[4:]).all()


# ---- the route ------------------------------------------------------------------------------------------------------

REQUEST = AttendRequest("host", "verify", "q8_0", 128, 4, 2, 40, 900, "chain", False, False)


def proof(head_dim: int = 128) -> evidence.Evidence:
    """Evidence that opens the route on the host."""
    (record,) = load(json.dumps({"schema": SCHEMA, "records": [measured_record()]}), "a test")
    shape = dataclasses.replace(record.shape, head_dim=head_dim)
    return dataclasses.replace(record, arch="host", route="wmma_prefill", shape=shape, crossover=None, digests={})


def test_it_takes_a_prefill_by_itself_and_a_verify_block_where_insisted_on() -> None:
    block = dataclasses.replace(REQUEST, rows=16)
    assert admit(REQUEST).route == "tile_batched"
    with pytest.raises(hk.NotAdmitted, match="evidence"):
        admit(REQUEST, route_name="wmma_prefill")
    with evidence.using([proof()]):
        assert admit(REQUEST).route == "wmma_prefill"
        assert admit(REQUEST).fallback == "tile_batched"
        assert admit(block).route == "tile_batched"
        assert "prefill rows: 16, required above 32, or route='wmma_prefill'" in admit(block).explain()
        assert admit(block, route_name="wmma_prefill").route == "wmma_prefill"
        for changes in ({"head_dim": 96}, {"layout": "tree"}, {"window": 5}):
            assert admit(dataclasses.replace(REQUEST, **changes)).route == "tile_batched"
        assert admit(dataclasses.replace(REQUEST, capturing=True)).route == "wmma_prefill"
    with evidence.using([dataclasses.replace(proof(), crossover=Crossover(900, None, None))]):
        assert admit(REQUEST).route == "tile_batched"


def test_attend_runs_it(host: Device) -> None:
    i = inputs(Case(40, 90, 4, 2, 128, seed=4))
    decisions: list[hk.Decision] = []
    with evidence.using([proof()]):
        got = hk.attend(i.q, i.k_cache, i.v_cache, i.positions, on_decision=decisions.append)
        forced = hk.attend(i.q[:7], i.k_cache, i.v_cache, i.positions[:7], route="wmma_prefill")
    assert decisions[0].route == "wmma_prefill"
    assert worst_row(got, reference_attend(i.q, i.k_cache, i.v_cache, i.positions)) < 1e-3
    assert np.array_equal(forced, got[:7])


def test_a_plan_for_the_whole_cache_is_right_at_every_context(host: Device) -> None:
    """What a captured launch is: it was given the capacity, and reads on the device what the rows see."""
    v = FAMILY.variant(head_dim=128)
    i = inputs(Case(4, 300, 4, 2, 128, seed=6))
    plan = verify_plan(v, host, check_verify(host, i.q, i.k_cache, i.v_cache), i.k_cache.shape[0])
    out = np.zeros(i.q.shape, np.float32)
    for last in (4, 20, 150, 300):
        positions = np.arange(last - 4, last, dtype=np.int32)
        plan.run(i.q, i.k_cache, i.v_cache, positions, out)
        assert worst_row(out, reference_attend(i.q, i.k_cache, i.v_cache, positions)) < 1e-3


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_no_spills_no_scratch(v: Variant, arch: str) -> None:
    built = build(v, arch=arch)
    taken = built.resources
    assert (taken.vgpr_spills, taken.sgpr_spills, taken.scratch_bytes, built.log) == (0, 0, 0, "")
