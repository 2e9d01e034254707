"""What kept plans, workspaces and loaded kernels are found by: calls that differ in one part alone share nothing."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from route_lab import opened

import hipfire_kernels as hk
from hipfire_kernels.checking.parity import Case, inputs, worst_row
from hipfire_kernels.dispatch import calls, graph_key, policy, tuning
from hipfire_kernels.dispatch.calls import Owner, PlanKey
from hipfire_kernels.running.binding import kernel
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.draft import DraftWorkspace

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]
OTHER_HOST = HostDevice()


@pytest.fixture(autouse=True)
def nothing_kept(_own_cache: None) -> Iterator[None]:
    """Every route is open, and no plan is there."""
    calls._plans.clear()
    calls._workspaces.clear()
    with opened(128, 4, 2):
        yield
    calls._plans.clear()
    calls._workspaces.clear()


def attend(rows: int = 5, ctx: int = 40, unseen: int = 37, columns: int = 0, **options: Any) -> Array:
    """A call of `rows` at `ctx` keys in a cache of `unseen` more, held against the oracle."""
    i = inputs(Case(rows, ctx, 4, 2, 128, seed=rows))
    caches = [hk.quantize_q8_0(np.nan_to_num(hk.dequantize_q8_0(c[: ctx + unseen]))) for c in (i.k_cache, i.v_cache)]
    if len(caches[0]) < ctx + unseen:
        caches = [np.concatenate([c, np.zeros((ctx + unseen - len(c), *c.shape[1:]), np.uint8)]) for c in caches]
    positions = i.positions[::-1].copy() if options.pop("reversed", False) else i.positions
    arrays = {"q": i.q, "k_cache": caches[0], "v_cache": caches[1], "positions": positions}
    masks: dict[str, Any] = {"window": options.pop("window")} if "window" in options else {}
    if columns:
        masks = {"tree_bias": np.zeros((rows, columns), np.float32)}
    got = hk.attend(**arrays, **masks, **{"route": "tile_batched", **options})
    assert worst_row(got, hk.reference.attend(**arrays, **masks)) < 2e-3
    return got


_ELSEWHERE = ThreadPoolExecutor(1)


def elsewhere(call: Call) -> Any:
    """In another thread, always the same."""
    return _ELSEWHERE.submit(contextvars.copy_context().run, call).result()


def with_splits(splits: int) -> Any:
    """A split route, with a tuning that says so."""
    with pytest.MonkeyPatch.context() as patch:
        chosen = tuning.Choice({"splits": splits}, "a test")
        patch.setattr(tuning, "find", lambda family, request: chosen if family.records == "split" else None)
        return attend(route="verify_gqa")


def with_partials_rows(rows: int) -> Any:
    with policy.override(partials_rows=rows):
        return attend()


PLANS: dict[str, tuple[Call, Call]] = {
    "route": (attend, lambda: attend(route="verify_gqa")),
    "tuning": (lambda: with_splits(2), lambda: with_splits(3)),
    "layout": (attend, lambda: attend(reversed=True)),
    "windowed": (attend, lambda: attend(window=9)),
    "fixed": (attend, lambda: attend(capturing=True)),
    "shape": (attend, lambda: attend(rows=6)),
    "covers": (lambda: attend(ctx=100, unseen=500), lambda: attend(ctx=300, unseen=300)),
    "block_cols": (lambda: attend(columns=5), lambda: attend(columns=6)),
    "partials_rows": (lambda: with_partials_rows(2), lambda: with_partials_rows(3)),
    "owner": (attend, lambda: elsewhere(attend)),
}


def test_no_part_of_a_plans_key_is_left_out() -> None:
    assert set(PLANS) == set(PlanKey._fields)
    assert set(OWNERS) == set(Owner._fields) - {"stream"}  # the host has none: standins/on_calls.py


@pytest.mark.parametrize("part", PLANS)
def test_calls_that_differ_in_one_part_have_plans_of_their_own(part: str) -> None:
    for call in PLANS[part]:
        call()
        call()
    first, second = calls._plans
    assert [name for name in PlanKey._fields if getattr(first, name) != getattr(second, name)] == [part]
    one, other = calls._plans.values()
    assert one is not other


OWNERS: dict[str, tuple[Call, Call]] = {
    "device": (lambda: attend(device="host"), lambda: attend(device=OTHER_HOST)),
    "thread": (attend, lambda: elsewhere(attend)),
}


@pytest.mark.parametrize("part", OWNERS)
def test_owners_that_differ_in_one_part_have_plans_of_their_own(part: str) -> None:
    for call in OWNERS[part]:
        call()
    first, second = (key.owner for key in calls._plans)
    assert [name for name in Owner._fields if getattr(first, name) != getattr(second, name)] == [part]
    one, other = calls._plans.values()
    assert one.device is first.device
    assert other.device is second.device


def test_what_no_part_stands_for_finds_the_plan() -> None:
    """The arrays, their values, the scale, the width of a window, a context that the same workspace covers."""
    attend(ctx=130, unseen=200)
    attend(ctx=250, unseen=80, scale=1 / np.sqrt(128))
    assert len(calls._plans) == 1
    for window in (9, 11):
        attend(window=window)
    assert len(calls._plans) == 2


def draft(heads: int = 4, keys: int = 150, **options: Any) -> Array:
    rng = np.random.default_rng(heads)
    q, k, v = (rng.standard_normal((n, h, 128), np.float32) for n, h in ((5, heads), (keys, 2), (keys, 2)))
    got = hk.draft_attend(q, k, v, route="dflash_n64", **options)
    assert worst_row(got, hk.reference.draft_attend(q, k, v)) < 2e-4
    return got


DRAFT_OWNERS: dict[str, tuple[Call, Call]] = {
    "device": (lambda: draft(device="host"), lambda: draft(device=OTHER_HOST)),
    "thread": (draft, lambda: elsewhere(draft)),
}


@pytest.mark.parametrize("part", DRAFT_OWNERS)
def test_draft_workspaces_have_owners(part: str) -> None:
    for call in DRAFT_OWNERS[part]:
        call()
        call()
    first, second = calls._workspaces
    assert [name for name in Owner._fields if getattr(first, name) != getattr(second, name)] == [part]
    one, other = calls._workspaces.values()
    assert one.partials is not other.partials


def test_a_draft_workspace_is_one_calls_at_a_time() -> None:
    """A call of the same owner from between the launches of another has one of its own."""
    device = HostDevice()
    launch, between = device.launch, [lambda: draft(keys=90, device=device)]

    def interrupted(launches: Any, stream: Any = None) -> None:
        launch(launches[:1])
        if between:
            between.pop()()
        launch(launches[1:])

    device.launch = interrupted  # type: ignore[method-assign]
    draft(device=device)
    assert not between


MADE = {"variant": None, "device": None, "rows": 5, "n_heads": 4, "n_kv_heads": 2}


@pytest.mark.parametrize("part", [*MADE, "splits"])
def test_a_draft_workspace_is_made_anew_for_another_part(part: str) -> None:
    n64 = hk.families()["attention_dflash_wmma_n64_f32"]
    before: dict[str, Any] = {
        **MADE,
        "variant": n64.variant(head_dim=128, kv="f32", sliding=False),
        "device": hk.device("host"),
    }
    other = {
        "variant": n64.variant(head_dim=128, kv="f16", sliding=False),
        "device": OTHER_HOST,
        "rows": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
    }
    held = DraftWorkspace(splits=3)
    held.make(**before)
    first = (held.partials, held.positions)
    held.make(**before)
    assert held.partials is first[0]
    if part == "splits":
        held.splits = 4
        held.make(**before)
    else:
        held.make(**{**before, part: other[part]})
    assert held.partials is not first[0]
    assert held.positions is not first[1]


def test_a_loaded_kernel_is_a_devices() -> None:
    tile = hk.families()["attention_flash_q8_0_tile_batched"]
    variant, other = (tile.variant(head_dim=64, mask=mask) for mask in ("causal", "window"))
    host = hk.device("host")
    assert kernel(variant, host) is kernel(variant, host)
    assert kernel(variant, host) is not kernel(variant, OTHER_HOST)
    assert kernel(variant, host) is not kernel(other, host)


def test_the_key_of_a_graph_forgets_nothing() -> None:
    flat = np.zeros(64, np.float32)
    host, known = hk.device("host"), flat[:32]
    key = graph_key(host, x=known)
    assert key == graph_key(host, x=flat[:32])
    others = {
        "address": {"x": flat[4:36]},
        "shape": {"x": known.reshape(4, 8)},
        "dtype": {"x": known.view(np.int32)},
        "name": {"y": known},
        "number": {"x": known, "y": known},
    }
    for what, arrays in others.items():
        assert graph_key(host, **arrays) != key, what


def test_threads_at_once_share_no_workspace() -> None:
    """What a plan that two of them had would do to the numbers: each has its own q, and the same shapes."""
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        i = inputs(Case(5, 300, 4, 2, 128, seed=seed))
        call = {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}
        want = hk.reference.attend(**call)
        start.wait()
        for _ in range(10):
            assert worst_row(hk.attend(**call, route="tile_batched"), want) < 1e-5

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(calls._plans) == 4
