"""The split verify kernels: against the oracle, a row in any company, one grid for every context, their routes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import verify_lab
from budget import some
from test_qualify import fake_timer

from hipfire_kernels import attend, build, families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.oracle import check
from hipfire_kernels.checking.parity import Case, grid, inputs, run_attend
from hipfire_kernels.checking.parity_split import stretch
from hipfire_kernels.dispatch import AttendRequest, admit, counters, evidence, measure, plan, policy, qualify
from hipfire_kernels.dispatch.measure import Settings
from hipfire_kernels.dispatch.record import Crossover, Evidence, Parity, Shape, Speed, Verdict
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.layout import MAX_SPLITS, partials_shape, splits_for
from hipfire_kernels.model.attention import Q8Attention
from hipfire_kernels.running.attention import SplitPlan, VerifyShape, check_verify, verify_plan, workspace_shape
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import Device, Launch

GQA, MMA = (families()[f"attention_verify_{name}_q8"] for name in ("gqa", "mma"))
HELD = [v for v in GQA.variants() if v.group in (1, 6, 8)]
HELD += [v for v in MMA.variants() if v.group in (1, 6) and v.fits("host")]
WHOLE_GRID = [v for v in HELD if v.group == 6 and v.rows == 16]
PAIR = [GQA.variant(head_dim=256, group=6, rows=16), GQA.variant(head_dim=128, group=1, rows=4)]


def by_name(v: Variant) -> str:
    return v.name


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", WHOLE_GRID, ids=by_name)
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [((1, 2, 63, 64, 65, 127, 129, 255), (1, 4, 5, 8, 16, 31)), ((2048, 4097), (4, 16))],
    ids=["short", "long"],
)
def test_over_the_grid(variant: Variant, contexts: tuple[int, ...], rows: tuple[int, ...], host: Device) -> None:
    for case in grid(variant, contexts=contexts, rows=rows):
        result = check(variant, case, host)
        assert result.ok, result.describe()


@pytest.mark.parametrize("variant", some([v for v in HELD if v not in WHOLE_GRID], 8), ids=by_name)
def test_other_shapes(variant: Variant, host: Device) -> None:
    for case in grid(variant, rows=(5, 17), contexts=(1, 65, 300)):
        result = check(variant, case, host)
        assert result.ok, result.describe()


@pytest.mark.parametrize("variant", PAIR, ids=by_name)
@pytest.mark.parametrize("ctx", [5, 130, 700])
def test_a_row_has_the_same_bits_in_any_company(variant: Variant, ctx: int, host: Device) -> None:
    """Also where rows end in different steps of 64 keys, and where the group has another number of rows."""
    case = Case(16, ctx, 2 * variant.group, 2, variant.head_dim, seed=5)
    whole, _ = run_attend(variant, case, host)
    for start, count in [(0, 1), (7, 1), (15, 1), (3, 4), (12, 4), (5, 8), (0, 15)]:
        part, _ = run_attend(variant, case, host, slice(start, start + count))
        assert np.array_equal(part, whole[start : start + count]), (start, count)
    for other in GQA.variants():
        if (other.head_dim, other.group) == (variant.head_dim, variant.group):
            assert np.array_equal(run_attend(other, case, host)[0], whole), other.name


@pytest.mark.parametrize("variant", HELD[:: len(HELD) // 6], ids=by_name)
def test_nan_behind_a_rows_bound_stays_behind(variant: Variant, host: Device) -> None:
    assert verify_lab.nan_behind_a_bound(variant, host) == ""


@pytest.mark.parametrize("variant", WHOLE_GRID, ids=by_name)
def test_rows_of_no_chain(variant: Variant, host: Device) -> None:
    assert verify_lab.rows_of_no_chain(variant, host) == ""


@pytest.mark.parametrize("variant", HELD[:: len(HELD) // 6], ids=by_name)
def test_nothing_behind_an_array_is_read(variant: Variant, host: Device) -> None:
    """Where it is, the process ends."""
    assert verify_lab.end_of_memory(variant, host) == ""


@pytest.mark.parametrize("variant", HELD[:: len(HELD) // 6], ids=by_name)
def test_thread_order_does_not_matter(variant: Variant, host: Device) -> None:
    case = Case(5, 200, 2 * variant.group, 2, variant.head_dim)
    devices = [host, *(HostDevice(thread_order=seed) for seed in range(3))]
    outputs = [run_attend(variant, case, device)[0] for device in devices]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("variant", [v for v in HELD if v.family is GQA and v.group in (1, 6)], ids=by_name)
def test_gqa_reads_no_lds_that_nobody_has_written(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it where that goes nowhere: a Quad of weights is read whole. LDS starts as 0xff bytes."""
    fetched = "*(Quad*)(void*)x[h] = ((Quad*)(void*)weights)[(lane() + 32 * h) * WEIGHTS + quad];"
    name = f"{GQA.name}.hip.j2"
    source = (Path(templates.__file__).parents[2] / "templates" / name).read_text()
    assert source.count(fetched) == 1
    stop = "hk::fail(hk::LDS_OVERRUN, hk::here(), hk::here())"
    looks = f"for (float y : x[h]) if (__builtin_bit_cast(unsigned, y) == ~0u) {stop};"
    original = templates._environment(None)
    assert original.loader is not None
    edited = jinja2.DictLoader({name: source.replace(fetched, f"{{ {fetched} {looks} }}")})
    overlay = original.overlay(loader=jinja2.ChoiceLoader([edited, original.loader]), cache_size=0)
    monkeypatch.setattr(templates, "_environment", lambda folder: overlay)
    case = Case(variant.rows, 129, variant.group, 1, variant.head_dim)
    assert check(variant, case, HostDevice()).ok


def test_one_grid_and_one_workspace_for_every_context(host: Device) -> None:
    case = Case(16, 900, 12, 2, 256)
    i, variant = inputs(case), PAIR[0]
    shape = check_verify(host, i.q, i.k_cache, i.v_cache)
    prepared = verify_plan(variant, host, shape, 900)
    assert isinstance(prepared, SplitPlan)
    assert len({workspace_shape(variant, host.multiprocessors, shape, ctx) for ctx in (900, 1 << 18)}) == 1
    grids = set()
    for ctx in (16, 64, 65, 300, 900):
        positions = np.arange(ctx - 16, ctx, dtype=np.int32)
        prepared.run(i.q, i.k_cache, i.v_cache, positions, np.empty_like(i.q), ctx=ctx)
        grids.add(tuple(one.grid for one in prepared.launches))
    assert grids == {((4, 2, 1), (16, 4 * 12, 1))}
    assert all(one.args.keeps is prepared.partials for one in prepared.launches)  # a captured graph has no plan


def test_32_rows_go_at_once(host: Device) -> None:
    prepared = verify_plan(PAIR[1], host, VerifyShape(33, 2, 2, 128, 64), 64)
    assert len(prepared.partials) == 32


def test_a_row_behind_what_is_covered_is_nan(host: Device) -> None:
    i = inputs(Case(4, 300, 12, 2, 256))
    variant = GQA.variant(head_dim=256, group=6, rows=4)
    out = np.zeros_like(i.q)
    prepared = verify_plan(variant, host, check_verify(host, i.q, i.k_cache, i.v_cache), 298)
    prepared.run(i.q, i.k_cache, i.v_cache, i.positions, out)
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2:]).all()


def test_another_number_of_heads_is_refused_before_the_launch(host: Device) -> None:
    i = inputs(Case(4, 30, 8, 2, 256))
    partials = np.zeros(partials_shape(4, 8, 4, 256), np.float32)
    arrays = {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions, "partials": partials}
    with pytest.raises(InputError, match="n_heads is 8 with 2 KV heads; required: 6 query heads for each KV head"):
        launch(PAIR[0], host, **arrays, first_row=0, batch=4, scale=1.0)


@pytest.mark.parametrize(
    ("multiprocessors", "kv_heads", "row_groups", "splits"),
    [(132, 4, 1, 33), (132, 4, 2, 16), (48, 4, 1, 12), (8, 2, 1, 4), (8, 16, 1, 1), (1024, 1, 1, MAX_SPLITS)],
)
def test_splits_fill_the_device_once(multiprocessors: int, kv_heads: int, row_groups: int, splits: int) -> None:
    assert splits_for(multiprocessors, kv_heads, row_groups) == splits


@pytest.mark.parametrize("variant", PAIR, ids=by_name)
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_it_builds_without_spills_within_64_kib(variant: Variant, arch: str) -> None:
    taken = build(variant, arch).resources
    assert (taken.vgpr_spills, taken.sgpr_spills, taken.scratch_bytes) == (0, 0, 0)
    assert (taken.lds_bytes or 0) <= 64 << 10
    assert taken.lds_bytes == variant.lds_bytes(arch)


def test_more_than_48_kib_on_nvidia_is_an_arena() -> None:
    """The one declares its arrays, the other points into an arena."""
    plain, wide = PAIR[1], max(MMA.variants(), key=lambda v: v.lds_bytes("sm_90"))
    assert wide.lds_bytes("sm_90") > 48 << 10 >= plain.lds_bytes("sm_90")
    assert "shared_arena" in wide.source("sm_90")
    assert "shared_arena" not in plain.source("sm_90")


def test_larger_products_have_a_larger_limit_where_queries_are_rounded() -> None:
    assert (stretch(Case(16, 300, 12, 2, 256)) == 1).all()
    large = stretch(Case(16, 300, 12, 2, 256, "large"))
    assert large[::3].min() > 5
    assert (large[1::3] == 1).all()


# ---- the routes -----------------------------------------------------------------------------------------------------


def record(route: str, ratios: dict[int, float], group: int = 6, rows: Sequence[int] = (4, 16)) -> Evidence:
    """Measured evidence for head_dim 256 on the host: the ratio at each context, for all rows alike."""
    request = AttendRequest("host", "verify", "q8_0", 256, 4 * group, 4, max(rows))
    entry = route_named(route).variant(request).entry
    speed = [Speed(ctx, b, 100 / r, 100.0, r, (r, r), None) for ctx, r in ratios.items() for b in rows]
    return Evidence(
        arch="host",
        device="A card",
        driver="1",
        toolchain="a compiler",
        date="2026-02-03",
        route=route,
        kind="measured",
        shape=Shape(256, 4 * group, 4, tuple(rows)),
        parity=Parity(9, 1e-6, 1e-5, True),
        speed=tuple(speed),
        crossover=Crossover(min(ratios), None, None),
        digests={entry: str(evidence.source_digest(entry, "host"))},
        verdict=Verdict(True, "a test"),
        source="a test",
    )


def ask(**changes: Any) -> AttendRequest:
    base = AttendRequest("host", "verify", "q8_0", 256, 24, 4, 16, 20000, "chain", False, False)
    return dataclasses.replace(base, **changes)


def test_each_number_of_rows_is_timed_with_its_own_kernel() -> None:
    (target,) = qualify.targets("host", ("verify_gqa",), (256,), Settings())
    assert [target.at(rows).rows for rows in (4, 8, 16, 32)] == [4, 8, 16, 16]
    assert {v.rows for v in target.kernels()[:-1]} == {4, 8, 16}
    assert target.kernels()[-1].entry == "attention_flash_reduce_batched_d8_splits"
    assert target.key == ("host", "verify_gqa", 256, 6)


def test_qualify_opens_the_route_for_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Device) -> None:
    tiny = Settings((128, 256), rounds=4, n_heads=2, n_kv_heads=1, parity_cases=4, parity_ctx=260, parity_long=0)
    monkeypatch.setattr(measure, "timer", fake_timer(dict.fromkeys(range(8), 2.0)))
    about = qualify.targets("host", ("verify_gqa",), (128,), tiny)
    (found,) = qualify.qualify(host, about, tiny, tmp_path / "out.json", lambda *_: None)
    assert found.verdict.admitted, found.verdict.why
    assert found.shape.rows == (4, 8, 16, 32)
    assert found.parity.cases == 4 * 4
    with evidence.using(evidence.read_file(tmp_path / "out.json")):
        small = ask(head_dim=128, n_heads=2, n_kv_heads=1, logical_ctx=200)
        assert admit(small).route == "verify_gqa"
        assert admit(dataclasses.replace(small, n_heads=3)).route == "tile_batched"


@pytest.fixture
def opened() -> Iterator[None]:
    records = [record("verify_gqa", {128: 3.0, 2048: 4.0, 16384: 2.0}), record("rows8", {2048: 1.5, 16384: 2.5})]
    with evidence.using(records):
        yield


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({}, "rows8"),  # 2.5x against 2.0x at the nearest measured context
        ({"logical_ctx": 5000}, "verify_gqa"),
        ({"logical_ctx": 128}, "verify_gqa"),
        ({"logical_ctx": 127}, "tile_batched"),
        ({"rows": 1}, "verify_gqa"),
        ({"rows": 33}, "tile_batched"),
        ({"layout": "independent"}, "verify_gqa"),
        ({"layout": "tree"}, "tile_batched"),
        ({"window": 100}, "tile_batched"),
        ({"capturing": True}, "verify_gqa"),
        ({"recording": True}, "verify_gqa"),
        ({"n_heads": 12, "n_kv_heads": 2}, "rows8"),
        ({"n_heads": 32, "logical_ctx": 5000}, "rows8"),  # eight heads a KV head: other kernels, and no evidence
        ({"n_heads": 36, "logical_ctx": 5000}, "rows8"),
        ({"head_dim": 128}, "tile_batched"),
    ],
    ids=str,
)
def test_the_fastest_admitted_route_runs(opened: None, changes: dict[str, Any], route: str) -> None:
    assert admit(ask(**changes)).route == route


def test_the_decision_says_what_was_measured(opened: None) -> None:
    decision = admit(ask(logical_ctx=5000))
    said = (
        "measured over the established route: verify_gqa 4.00x at 16 rows, 2048 keys, rows8 1.50x at 16 rows, 2048 keys"
    )
    assert said in decision.explain()
    assert decision.as_dict()["speed"]["rows8"]["ratio"] == 1.5
    assert decision.fallback == "tile_batched"
    assert decision.evidence is not None
    assert decision.evidence.route == "verify_gqa"
    assert admit(ask(logical_ctx=5000), route_name="rows8").route == "rows8"


def test_a_route_measured_as_slower_here_gives_way_to_the_established_one() -> None:
    with evidence.using([record("verify_gqa", {128: 0.9, 16384: 2.0})]):
        assert admit(ask(logical_ctx=500)).route == "tile_batched"
        assert admit(ask(logical_ctx=500), route_name="verify_gqa").route == "verify_gqa"


def test_the_switch_narrows(opened: None) -> None:
    with policy.override({"HIPFIRE_VERIFY_ATTN": "0"}):
        assert admit(ask(logical_ctx=5000)).route == "rows8"
        with pytest.raises(NotAdmitted, match="HIPFIRE_VERIFY_ATTN: 0, required 1 or unset"):
            admit(ask(), route_name="verify_gqa")
    with policy.override({"HIPFIRE_VERIFY_ATTN": "yes"}), pytest.raises(InputError, match="legal: 1"):
        admit(ask())


def test_attend_takes_the_route(opened: None, host: Device) -> None:
    i = inputs(Case(16, 300, 24, 4, 256))
    want = reference.attend(i.q, i.k_cache, i.v_cache, i.positions)
    seen: list[Any] = []
    got = attend(i.q, i.k_cache, i.v_cache, i.positions, on_decision=seen.append)
    assert seen[0].route == "verify_gqa"
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_the_launcher_checks_by_itself(opened: None, host: Device) -> None:
    """Evidence that is gone by the time of the launch: the established route runs, once, and it is counted."""
    i = inputs(Case(16, 300, 24, 4, 256))
    prepared = plan(ask(logical_ctx=300), host, capacity=len(i.k_cache))
    counters.reset()
    arrays = (i.q, i.k_cache, i.v_cache, i.positions, np.empty_like(i.q))
    assert prepared.run(*arrays) == "verify_gqa"
    with evidence.using([]):
        assert prepared.run(*arrays) == "tile_batched"
    assert counters.snapshot()["drift"] == {"verify_gqa: no evidence for host holds": 1}
    counters.reset()


def test_a_block_is_captured_where_a_graph_holds_the_fastest_route(host: Device) -> None:
    attention = Q8Attention(host)
    cache = attention.cache(4, 256)
    block = np.zeros((16, 24, 256), np.float32), np.arange(2984, 3000, dtype=np.int32)
    for records, directly in (([record("verify_gqa", {128: 3.0})], False), ([record("rows8", {128: 3.0})], True)):
        with evidence.using(records):
            assert attention._is_faster_directly(cache, *block) is directly


def test_a_query_between_16_byte_boundaries(host: Device) -> None:
    """verify_mma reads queries 16 bytes at a time: refused before any launch. verify_gqa reads any float32."""
    case = Case(5, 300, 4, 1, 128)
    i = inputs(case)
    raw = np.zeros(i.q.size + 4, np.float32)
    q = raw[(16 - raw.ctypes.data % 16) // 4 % 4 + 1 :][: i.q.size].reshape(i.q.shape)
    q[...] = i.q
    out = np.full_like(i.q, 7.0)
    shape = Shape(128, 4, 1, (16,))
    open_both = [dataclasses.replace(record(name, {1: 2.0}), shape=shape) for name in ("verify_mma", "verify_gqa")]
    with evidence.using(open_both):
        with pytest.raises(InputError, match=r"q is at an address that is not a multiple of 16, which .*verify_mma_q8"):
            attend(q, i.k_cache, i.v_cache, i.positions, out=out, route="verify_mma")
        assert np.all(out == 7.0)
        attend(q, i.k_cache, i.v_cache, i.positions, out=out, route="verify_gqa")
        assert np.array_equal(out, attend(i.q, i.k_cache, i.v_cache, i.positions, route="verify_gqa"))


class Capturing(HostDevice):
    """A host that can note launches instead of running them, as a graph does."""

    noted: list[Launch] | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Launch]]:
        self.noted, self.capturing = [], True
        yield self.noted
        self.noted, self.capturing = None, False

    def launch(self, launches: Sequence[Launch], stream: Any = None) -> None:
        if self.noted is None:
            super().launch(launches, stream)
        else:
            self.noted += launches


@pytest.mark.parametrize("variant", WHOLE_GRID[:1] + [v for v in WHOLE_GRID if v.family is MMA][:1], ids=by_name)
def test_captured_once_it_is_right_at_every_live_context(variant: Variant, host: Device) -> None:
    name = "verify_gqa" if variant.family is GQA else "verify_mma"
    case = Case(16, 1500, 24, 4, variant.head_dim)
    i = inputs(case)
    q, positions, out = i.q.copy(), i.positions.copy(), np.empty_like(i.q)
    card = Capturing()
    key = dataclasses.replace(record(name, {1: 2.0}), shape=Shape(variant.head_dim, 24, 4, (16,)))
    with evidence.using([key]):
        with card.capture() as graph:
            attend(q, i.k_cache, i.v_cache, positions, out=out, device=card, route=name)
        assert graph[0].grid == (2, 4, 1)
        for ctx in (16, 17, 63, 64, 65, 129, 500, 777, 1024, 1500):
            positions[...] = np.arange(ctx - 16, ctx)
            q[...] = np.random.default_rng(ctx).standard_normal(q.shape, np.float32)
            card.launch(graph)
            direct = attend(q, i.k_cache, i.v_cache, positions.copy(), device=host, route=name)
            assert np.array_equal(out, direct), ctx
