"""Draft attention on matrix units: against the float64 oracle, under each GPU's lane map, and through the routes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from budget import some
from matrix_lab import MAPS, as_on, map_device
from test_evidence import record as measured_record

import hipfire_kernels as hk
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import build
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import Case
from hipfire_kernels.checking.reference import draft_attend as reference_attend
from hipfire_kernels.dispatch import AttendRequest, admit, evidence
from hipfire_kernels.dispatch.record import SCHEMA, Crossover, load
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device
from hipfire_kernels.running.draft import DraftWorkspace, draft_attend_rows

Array = npt.NDArray[np.float64]

M16, M32, N64 = "attention_dflash_wmma_f32", "attention_dflash_wmma_m32_f32", "attention_dflash_wmma_n64_f32"
ROUTES = {"dflash_n64": N64, "dflash_m32": M32, "dflash_m16": M16}


def variant(family: str, head_dim: int, kv: str, sliding: bool) -> Variant:
    return hk.families()[family].variant(head_dim=head_dim, kv=kv, sliding=sliding)


VARIANTS = (
    variant(M16, 128, "f32", True),
    variant(M16, 256, "f16", False),
    variant(M16, 64, "f16", True),
    variant(M32, 128, "f32", False),
    variant(M32, 64, "f16", True),
    variant(N64, 128, "f32", False),
    variant(N64, 128, "f32", True),
    variant(N64, 128, "f16", False),
    variant(N64, 128, "f16", True),
)
"""One of each formulation; `hfk parity` runs all."""


def sweep(v: Variant) -> Iterator[Case]:
    """Around the ends of fragments and tiles; windows inside, at and beyond them. There are ctx + rows keys."""
    for rows in (1, 5, 16, 31):
        for group in (1, 4, 6):
            for ctx in (1, 15, 48, 64, 129, 300):
                windows = (1, 63, ctx + rows + 9) if v.sliding else (0,)
                window = windows[(rows + ctx) % len(windows)]
                yield Case(rows, ctx, 2 * group, 2, v.head_dim, window=window, seed=rows * 1000 + ctx + group)


@pytest.mark.parametrize("v", some(VARIANTS, 5), ids=lambda v: v.name)
def test_the_sweep(v: Variant, host: Device) -> None:
    """72 cases each: 648."""
    for case in sweep(v):
        result = check(v, case, host)
        assert result.ok, result.describe()


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("values", ["large", "zeros"])
def test_contents(v: Variant, values: str, host: Device) -> None:
    case = Case(9, 230, 8, 2, v.head_dim, values, window=90 if v.sliding else 0, seed=3)
    result = check(v, case, host)
    assert result.ok, result.describe()


def block(
    rows: int, keys: int, heads: tuple[int, int], head_dim: int, kv: str, seed: int = 0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads[0], head_dim), np.float32)
    dtype = np.float16 if kv == "f16" else np.float32
    k, v = (rng.standard_normal((keys, heads[1], head_dim), np.float32).astype(dtype) for _ in range(2))
    return q, k, v


def run(
    v: Variant, device: Device, arrays: tuple[Any, ...], workspace: DraftWorkspace | None = None, **span: Any
) -> Array:
    out = np.full(arrays[0].shape, np.nan, np.float32)
    draft_attend_rows(device, *arrays, out, variant=v, workspace=workspace, **span)
    return out


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_the_worst_absolute_difference(v: Variant, host: Device) -> None:
    arrays = block(16, 700, (8, 2), v.head_dim, v.kv)
    worst = np.abs(run(v, host, arrays) - reference_attend(*arrays)).max()
    assert worst < 5e-6, worst


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("v", [VARIANTS[i] for i in (0, 1, 6, 7)], ids=lambda v: v.name)
def test_no_lane_map_is_taken_for_granted(name: str, v: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    device = map_device(monkeypatch, name)
    taken = as_on(v, "sm_90") if name == "mma16" else v
    for rows, ctx in ((5, 20), (16, 130)):
        case = Case(rows, ctx, 8, 2, v.head_dim, window=70 if v.sliding else 0, seed=ctx)
        result = check(taken, case, device)
        assert result.ok, result.describe()


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
def test_any_number_of_splits(splits: int, host: Device) -> None:
    """More than there are tiles, too: their records hold no key, and stale memory is not read."""
    v = variant(N64, 128, "f16", False)
    arrays = block(5, 300, (4, 1), 128, "f16")
    workspace = DraftWorkspace(splits)
    workspace.make(v, host, 5, 4, 1)
    workspace.partials[...] = 1e3
    assert workspace.partials.shape[2] == splits
    got = run(v, host, arrays, workspace)
    assert np.abs(got - reference_attend(*arrays)).max() < 5e-6


def test_a_workspace_is_kept_and_made_anew_for_another_shape(host: Device) -> None:
    workspace = DraftWorkspace()
    v = variant(N64, 128, "f16", False)
    for rows, same in ((5, False), (5, True), (6, False)):
        before = workspace.partials
        run(v, host, block(rows, 70, (2, 1), 128, "f16"), workspace)
        assert (workspace.partials is before) is same


@pytest.mark.parametrize("v", [VARIANTS[i] for i in (0, 3, 6, 8)], ids=lambda v: v.name)
def test_the_order_of_the_threads_does_not_matter(v: Variant, host: Device) -> None:
    arrays = block(13, 200, (12, 2), v.head_dim, v.kv)
    span = {"window": 90, "causal": True} if v.sliding else {}
    first = run(v, host, arrays, **span)
    for seed in range(3):
        assert np.array_equal(run(v, HostDevice(thread_order=seed), arrays, **span), first)


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_a_head_has_the_same_bits_in_any_place(v: Variant, host: Device) -> None:
    """Other rows of another window share a wave with it then."""
    q, *context = block(7, 300, (5, 1), v.head_dim, v.kv)
    span = {"window": 31} if v.sliding else {}
    whole = run(v, host, (q, *context), **span)
    order = [3, 0, 4, 2, 1]
    moved = run(v, host, (np.ascontiguousarray(q[:, order]), *context), **span)
    assert np.array_equal(moved, whole[:, order])


@pytest.mark.parametrize("v", [VARIANTS[i] for i in (1, 3, 5, 7)], ids=lambda v: v.name)
def test_a_row_has_the_same_bits_in_any_company(v: Variant, host: Device) -> None:
    """Without a window: with one, a row alone stands elsewhere."""
    q, *context = block(16, 300, (6, 1), v.head_dim, v.kv)
    whole = run(v, host, (q, *context))
    for start, count in ((0, 1), (3, 5), (15, 1)):
        part = run(v, host, (q[start : start + count], *context))
        assert np.array_equal(part, whole[start : start + count])


@pytest.mark.parametrize("v", [v for v in VARIANTS if v.sliding], ids=lambda v: v.name)
def test_nan_that_no_row_sees_is_seen_by_none(v: Variant, host: Device) -> None:
    """In front of the first row's window. Where one row of a block sees a key and others do not, V must be a number."""
    arrays = block(4, 150, (4, 2), v.head_dim, v.kv)
    clean = run(v, host, arrays, window=20)
    for array in arrays[1:]:
        array[: 150 - 4 - 20 + 1] = np.nan
    assert np.array_equal(run(v, host, arrays, window=20), clean)


def test_scales(host: Device) -> None:
    for v in (VARIANTS[0], VARIANTS[5]):
        arrays = block(3, 90, (2, 1), 128, v.kv)
        for scale in (0.0, -0.3, 1.0):
            got = run(v, host, arrays, scale=scale)
            assert np.abs(got - reference_attend(*arrays, scale)).max() < 5e-5


def test_a_misaligned_array_is_refused_by_name(host: Device) -> None:
    q, k, v = block(2, 40, (2, 1), 128, "f32")
    shifted = np.zeros(k.size + 1, np.float32)[1:].reshape(k.shape)
    at = shifted if shifted.ctypes.data % 16 else k
    with pytest.raises(hk.InputError, match=r"k is at an address that is not a multiple of 16, which attention_dflash"):
        run(VARIANTS[0], host, (q, at, v))


def test_a_window_needs_the_form_that_has_one(host: Device) -> None:
    with pytest.raises(hk.InputError, match="has no window and no causal mask; take its variant with sliding=True"):
        run(VARIANTS[5], host, block(2, 40, (2, 1), 128, "f32"), window=8)


# ---- routes ---------------------------------------------------------------------------------------------------------


def proof(route: str, head_dim: int = 128) -> evidence.Evidence:
    """Evidence that opens a route on the host."""
    (record,) = load(json.dumps({"schema": SCHEMA, "records": [measured_record()]}), "a test")
    shape = dataclasses.replace(record.shape, head_dim=head_dim)
    return dataclasses.replace(record, arch="host", route=route, shape=shape, crossover=None, digests={})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_a_route_opens_with_evidence(route: str, kv: str, host: Device) -> None:
    arrays = block(4, 70, (4, 2), 128, kv)
    want = reference_attend(*arrays, None, 20)
    with pytest.raises(hk.NotAdmitted, match="evidence"):
        hk.draft_attend(*arrays, window=20, route=route)
    decisions: list[hk.Decision] = []
    with evidence.using([proof(route)]):
        got = hk.draft_attend(*arrays, window=20, on_decision=decisions.append)
    assert decisions[0].route == route
    assert decisions[0].fallback == ("dflash_sliding" if kv == "f32" else None)
    assert np.abs(got - want).max() < 5e-5


def test_f16_has_no_established_route() -> None:
    with pytest.raises(hk.NotAdmitted, match="kv_format: 'f16', required one of f32"):
        hk.draft_attend(*block(2, 40, (2, 1), 128, "f16"))


def test_without_evidence_the_scalar_kernel_runs() -> None:
    decisions: list[hk.Decision] = []
    hk.draft_attend(*block(2, 40, (2, 1), 128, "f32"), on_decision=decisions.append)
    assert decisions[0].route == "dflash_scalar"
    assert {c.name for c in decisions[0].rejected["dflash_n64"]} == {"evidence"}


REQUEST = AttendRequest("host", "draft", "f32", 128, 8, 2, 16, 900, "chain", False, False)


def test_the_widest_tile_comes_first_and_evidence_counts_for_its_head_dim() -> None:
    with evidence.using([proof(route, d) for route in ROUTES for d in (64, 128, 256)]):
        wanted = {128: "dflash_n64", 64: "dflash_m32", 256: "dflash_m16", 96: "dflash_scalar"}
        assert {d: admit(dataclasses.replace(REQUEST, head_dim=d)).route for d in wanted} == wanted
        assert admit(dataclasses.replace(REQUEST, capturing=True)).route is None
        assert admit(dataclasses.replace(REQUEST, window=None)).route is None


def test_up_to_the_measured_crossover_the_scalar_kernel_runs() -> None:
    with evidence.using([dataclasses.replace(proof("dflash_n64"), crossover=Crossover(900, None, None))]):
        assert admit(REQUEST).route == "dflash_scalar"
        assert admit(dataclasses.replace(REQUEST, logical_ctx=901)).route == "dflash_n64"


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
@pytest.mark.parametrize("v", [VARIANTS[i] for i in (0, 4, 6, 8)], ids=lambda v: v.name)
def test_no_spills_no_scratch(v: Variant, arch: str) -> None:
    built = build(v, arch=arch)
    taken = built.resources
    assert (taken.vgpr_spills, taken.sgpr_spills, taken.scratch_bytes, built.log) == (0, 0, 0, "")
    assert taken.lds_bytes is not None
    assert taken.lds_bytes <= 64 * 1024
