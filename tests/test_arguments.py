"""What is passed by value, and where arrays lie: one rule on every path, and refused before anything is launched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from route_lab import opened

import hipfire_kernels as hk
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.args import Scalar, Tensor
from hipfire_kernels.authoring.family import KernelFamily, Tolerance, Variant
from hipfire_kernels.checking.parity import Case, inputs, worst_row
from hipfire_kernels.dispatch import AttendRequest, Decision, Plan
from hipfire_kernels.errors import InputError
from hipfire_kernels.running import binding
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.devices.protocol import View
from hipfire_kernels.running.draft import draft_attend_rows

Array = np.ndarray[Any, Any]
TILE = hk.families()["attention_flash_q8_0_tile_batched"]
DRAFT = hk.families()["attention_dflash_f32"].variant(head_dim=64, sliding=True)
ROWS, HEADS, KV_HEADS, HEAD_DIM, CTX = 5, 4, 2, 64, 40


def verify_call() -> dict[str, Array]:
    i = inputs(Case(ROWS, CTX, HEADS, KV_HEADS, HEAD_DIM))
    return {name: getattr(i, name).copy() for name in ("q", "k_cache", "v_cache", "positions")}


def draft_call(keys: int = 30) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes = {"q": (ROWS, HEADS), "k": (keys, KV_HEADS), "v": (keys, KV_HEADS)}
    return {name: rng.standard_normal((*shape, HEAD_DIM), np.float32) for name, shape in shapes.items()}


def request(**changes: Any) -> AttendRequest:
    known = {
        "arch": "host",
        "kv_format": "q8_0",
        "head_dim": HEAD_DIM,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "rows": ROWS,
        "logical_ctx": CTX,
        "layout": "chain",
        "capturing": False,
        "recording": False,
    }
    return AttendRequest(**{**known, **changes})


# ---- numbers ---------------------------------------------------------------------------------------------------------


def attend(out: Array, **given: Any) -> None:
    hk.attend(**verify_call(), out=out, **given)


def draft_attend(out: Array, **given: Any) -> None:
    hk.draft_attend(**draft_call(), out=out, **given)


def draft_rows(out: Array, **given: Any) -> None:
    draft_attend_rows(hk.device("host"), **draft_call(), out=out, **given)


def plan_run(out: Array, **given: Any) -> None:
    hk.plan(request(), "host", capacity=CTX + 37).run(**verify_call(), out=out, **given)


def planned(out: Array, mask: str = "causal", **given: Any) -> None:
    call, device = verify_call(), hk.device("host")
    shape = check_verify(device, call["q"], call["k_cache"], call["v_cache"])
    verify_plan(TILE.variant(head_dim=HEAD_DIM, mask=mask), device, shape, CTX).run(**call, out=out, **given)


def planned_window(out: Array, **given: Any) -> None:
    planned(out, mask="window", **given)


def launch(out: Array, **given: Any) -> None:
    legal = {"scale": 0.125, "window": 30, "causal": 0}
    hk.launch(DRAFT, "host", **draft_call(), out=out, **{**legal, **given})


WHOLE: list[tuple[Callable[..., None], str]] = [
    (attend, "window"),
    (attend, "ctx"),
    (draft_attend, "window"),
    (draft_rows, "window"),
    (plan_run, "ctx"),
    (planned, "ctx"),
    (planned_window, "window"),
    (launch, "window"),
    (launch, "causal"),
]
NOT_WHOLE: list[Any] = [2**32 + 1, 2**31, -(2**31) - 1, True, np.True_, 8.0, 8.5, np.float32(8), "4", b"4", [4], 4j]
NOT_WHOLE += [np.array([4, 5]), Fraction(4)]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
@pytest.mark.parametrize(("path", "name"), WHOLE, ids=lambda p: getattr(p, "__name__", p))
def test_no_number_of_32_bits(path: Callable[..., None], name: str, value: Any) -> None:
    out = np.full((ROWS, HEADS, HEAD_DIM), 123.0, np.float32)
    with pytest.raises(InputError, match=f"^{name} is .*; required: "):
        path(out, **{name: value})
    assert (out == 123.0).all()


@pytest.mark.parametrize("value", [np.int64(7), np.uint8(7), np.array(7), np.array(7, np.int16)], ids=repr)
@pytest.mark.parametrize(("path", "name"), WHOLE[2:4] + WHOLE[6:8] + WHOLE[:1], ids=lambda p: getattr(p, "__name__", p))
def test_a_numpy_integer_is_an_integer(path: Callable[..., None], name: str, value: Any) -> None:
    got, want = (np.full((ROWS, HEADS, HEAD_DIM), np.nan, np.float32) for _ in range(2))
    path(got, **{name: value})
    path(want, **{name: 7})
    assert np.array_equal(got, want)
    assert np.isfinite(want).all()


REAL = [attend, draft_attend, draft_rows, plan_run, planned, launch]
NOT_REAL: list[Any] = [1e39, -1e39, 3.4028235677973366e38, 10**400, float("inf"), float("nan"), np.float64(1e39)]
NOT_REAL += [np.array(np.nan), "0.1", b"0.1", True, np.True_, 1j, [0.1], np.array([0.1, 0.2]), np.datetime64("2020")]


@pytest.mark.parametrize("value", NOT_REAL, ids=lambda v: f"{v!r:.20}")
@pytest.mark.parametrize("path", REAL)
def test_no_finite_float32(path: Callable[..., None], value: Any) -> None:
    out = np.full((ROWS, HEADS, HEAD_DIM), 123.0, np.float32)
    with pytest.raises(InputError, match=r"^scale is .*; required: a (finite )?number"):
        path(out, scale=value)
    assert (out == 123.0).all()


@pytest.mark.parametrize("value", [np.float32(0.25), np.float16(0.25), np.array(0.25), Fraction(1, 4)], ids=repr)
@pytest.mark.parametrize("path", REAL)
def test_a_number_of_another_kind_is_a_number(path: Callable[..., None], value: Any) -> None:
    got, want = (np.full((ROWS, HEADS, HEAD_DIM), np.nan, np.float32) for _ in range(2))
    path(got, scale=value)
    path(want, scale=0.25)
    assert np.array_equal(got, want)


def test_the_largest_float32_is_one() -> None:
    largest = float(np.finfo(np.float32).max)
    assert binding.real("scale", largest) == largest
    assert binding.real("scale", 3.4028235677973362e38) == 3.4028235677973362e38  # rounds to it
    assert binding.real("scale", 3) == 3.0


FLAGS = [(attend, "capturing"), (attend, "recording"), (draft_attend, "causal"), (draft_rows, "causal")]


@pytest.mark.parametrize("value", [1, 0, "yes", None, np.int64(1), [True]], ids=repr)
@pytest.mark.parametrize(("path", "name"), FLAGS)
def test_no_flag(path: Callable[..., None], name: str, value: Any) -> None:
    out = np.full((ROWS, HEADS, HEAD_DIM), 123.0, np.float32)
    with pytest.raises(InputError, match=f"^{name} is .*; required: True or False"):
        path(out, **{name: value})
    assert (out == 123.0).all()


@pytest.mark.parametrize(("path", "name"), FLAGS)
def test_a_numpy_flag_is_a_flag(path: Callable[..., None], name: str) -> None:
    got, want = (np.full((ROWS, HEADS, HEAD_DIM), np.nan, np.float32) for _ in range(2))
    path(got, **{name: np.True_})
    path(want, **{name: True})
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (attend, {"scale": "0.1"}),
        (attend, {"scale": 1e39}),
        (attend, {"window": 2**32 + 1}),
        (attend, {"ctx": 39}),
        (attend, {"ctx": 39, "capturing": True}),
        (attend, {"ctx": 39, "recording": True}),
        (attend, {"recording": 1}),
        (draft_attend, {"scale": "0.1"}),
        (draft_attend, {"window": 2**32 + 1}),
        (draft_attend, {"causal": 1}),
    ],
)
def test_nothing_is_decided_about_a_call_that_is_refused(run: Callable[..., None], given: dict[str, Any]) -> None:
    decided: list[Decision] = []
    with pytest.raises(InputError):
        run(np.zeros((ROWS, HEADS, HEAD_DIM), np.float32), on_decision=decided.append, **given)
    assert not decided


def test_a_number_that_equals_the_last_one_is_not_taken_for_it() -> None:
    plan = hk.plan(request(), "host", capacity=CTX + 37)
    out = np.zeros((ROWS, HEADS, HEAD_DIM), np.float32)
    plan.run(**verify_call(), out=out, ctx=40, scale=1.0)
    for wrong in ({"ctx": 40.0, "scale": 1.0}, {"ctx": 40, "scale": True}):
        with pytest.raises(InputError, match="required"):
            plan.run(**verify_call(), out=out, **wrong)


@pytest.mark.parametrize("value", [2**32 + 77, -1, True, "77", 7.5], ids=repr)
@pytest.mark.parametrize("name", ["capacity", "block_cols"])
def test_numbers_of_a_plan(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} is .*required: "):
        hk.plan(request(layout="tree"), "host", **{"capacity": 77, "block_cols": 3, name: value})


def test_numpy_numbers_of_a_request_become_pythons() -> None:

    numbers: dict[str, Any] = {
        "head_dim": np.int64(64),
        "n_heads": np.uint8(4),
        "n_kv_heads": np.int16(2),
        "rows": np.int32(5),
    }
    given = request(
        **numbers, logical_ctx=np.int64(40), capturing=np.False_, window=np.int64(0), layout=np.str_("chain")
    )
    assert given == request()
    assert json.dumps(given.as_dict()) == json.dumps(request().as_dict())
    plan = hk.plan(given, "host", capacity=np.int64(77))
    assert plan.decision.route == "tile_batched"


@pytest.mark.parametrize("workload", ["verify", "draft"])
@pytest.mark.parametrize("field", ["rows", "logical_ctx", "window"])
def test_a_request_beyond_32_bits_is_not_admitted(field: str, workload: str) -> None:
    asked = request(workload=workload, kv_format="q8_0" if workload == "verify" else "f32", **{field: 2**32 + 1})
    decision = hk.dispatch.admit(asked)
    assert decision.route is None
    assert field in {check.name for check in decision.rejected[list(decision.checks)[-1]]}


# ---- variants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("attention_flash_q8_0_rows", {"rows": 8.0, "head_dim": 128}),
        ("attention_flash_q8_0_rows", {"rows": "8", "head_dim": 128}),
        ("attention_verify_mma_q8", {"rows": 8, "head_dim": 128, "group": 2, "terms": True}),
        ("kv_cache_write_q8_0_batched", {"pair": 1}),
        ("attention_dflash_f32", {"head_dim": 64, "sliding": 0.0}),
    ],
)
def test_a_parameter_of_another_type_is_not_declared(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not declared; legal values"):
        hk.families()[name].variant(**params)


def test_a_numpy_parameter_is_the_same_variant() -> None:
    declared = hk.families()["attention_flash_q8_0_rows"]
    found = declared.variant(rows=np.int64(8), head_dim=np.uint8(128))
    assert found == declared.variant(rows=8, head_dim=128)
    assert {type(value) for _, value in found.params} == {int}
    pair = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=np.True_)
    assert pair.params == (("pair", True),)


# ---- a launch --------------------------------------------------------------------------------------------------------


def own(**changes: Any) -> Variant:
    """A family whose arrays and numbers share a symbol; its body is empty."""
    family = KernelFamily(
        name="own",
        doc="",
        params={"head_dim": (32,)},
        entry=lambda v: "own",
        args=lambda v: (
            Tensor("x", "f32", ("n",)),
            Tensor("out", "f32", ("n",), writes=True),
            *(Scalar(name, "i32") for name in ("n", "m")),
            Scalar("eps", "f32"),
        ),
        extents={"blocks": (0, 8)},
        grid=lambda v, s: (s.blocks, 1, 1),
        body="{{ signature }} {}",
        tolerance=Tolerance(0),
    )
    return dataclasses.replace(family, **changes).variant(head_dim=32)


def bound(**given: Any) -> binding.BoundLaunch:
    views = {name: View(64, (10,), "f32", True) for name in ("x", "out")}
    return binding.bind(own(), views, **{"m": 3, "eps": 1e-6, "blocks": 2, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 20}, "^n is 20; required: 10, as the shape of x has it, or leave it out"),
        ({"n": 9}, "^n is 9; required: 10"),
        ({"n": 10.0}, "^n is 10.0; required: a whole number"),
        ({"m": 2**31}, "^m is 2147483648; required: a 32-bit integer"),
        ({"m": "3"}, "^m is '3'; required: a whole number"),
        ({"eps": "a"}, "^eps is 'a'; required: a number"),
        ({"eps": 1e39}, "^eps is 1e[+]39; required: a finite number of float32"),
        ({"eps": None}, "^eps is None; required: a number"),
        ({"blocks": -1}, "^blocks is -1; required: 0 or more"),
        ({"blocks": 1.5}, "^blocks is 1.5; required: a whole number"),
        ({"blocks": True}, "^blocks is True; required: a whole number"),
    ],
)
def test_a_number_that_a_launch_cannot_have(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bound(**given)


def test_numbers_of_a_launch() -> None:
    for n in ({}, {"n": 10}, {"n": np.int64(10)}):
        found = bound(**n, m=np.int8(-3), blocks=np.int64(4))
        assert [found.slots[name].value for name in ("n", "m")] == [10, -3]
        assert vars(found.symbols) == {"n": 10, "m": -3, "eps": 1e-6, "blocks": 4}


def test_an_extent_that_a_shape_names_may_not_differ_from_it() -> None:
    args = (Tensor("out", "f32", ("n",), writes=True),)
    variant = own(extents={"n": (1, 64)}, args=lambda v: args, grid=lambda v, s: (s.n, 1, 1))
    views = {"out": View(64, (10,), "f32", True)}
    assert binding.bind(variant, views).symbols.n == 10
    with pytest.raises(InputError, match=r"^n is 11; required: 10, as the shape of out has it"):
        binding.bind(variant, views, n=11)


TILED = {"first_row": 0, "batch": 5, "live_tiles": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first_row": 1}, "first_row is 1 and batch 5; required: rows of the 5 that the arrays have"),
        ({"first_row": -1}, "first_row is -1 and batch 5"),
        ({"batch": 6}, "first_row is 0 and batch 6"),
        ({"live_tiles": 2}, "live_tiles is 2; required: at most the 1 tiles of partials"),
        ({"max_tiles": 7}, "^max_tiles is 7; required: 1, as the shape of partials has it"),
        ({"n_kv_heads": 4}, "^n_kv_heads is 4; required: 2, as the shape of k_cache has it"),
    ],
)
def test_a_launch_stays_inside_its_arrays(given: dict[str, Any], message: str) -> None:
    partials = np.zeros((5, HEADS, 1, 2 + HEAD_DIM), np.float32)
    variant = TILE.variant(head_dim=HEAD_DIM, mask="causal")
    with pytest.raises(InputError, match=message):
        hk.launch(variant, "host", **verify_call(), partials=partials, scale=0.1, **{**TILED, **given})
    if "batch" not in given:
        merge = hk.families()["attention_flash_reduce_batched"].variant(head_dim=HEAD_DIM, bound="causal")
        numbers = {**TILED, **given}
        numbers.pop("n_kv_heads", None)
        if numbers != TILED:
            out, positions = np.zeros((5, HEADS, HEAD_DIM), np.float32), verify_call()["positions"]
            with pytest.raises(InputError, match=message):
                hk.launch(merge, "host", partials=partials, positions=positions, out=out, **numbers)


def test_fewer_partials_than_rows_of_a_batch() -> None:
    partials = np.zeros((4, HEADS, 1, 2 + HEAD_DIM), np.float32)
    variant = TILE.variant(head_dim=HEAD_DIM, mask="causal")
    with pytest.raises(InputError, match="batch is 5; required: at most the 4 rows of partials"):
        hk.launch(variant, "host", **verify_call(), partials=partials, scale=0.1, **TILED)


def test_a_cache_with_blocks_for_another_head_dim() -> None:
    variant = hk.families()["kv_cache_write_q8_0_batched"].variant(pair=False)
    x, cache = np.zeros((2, 2, 64), np.float32), np.zeros((9, 2, 3, 34), np.uint8)
    with pytest.raises(InputError, match="head_dim is 64; required: 96, the 3 blocks of the cache"):
        hk.launch(variant, "host", x=x, cache=cache, positions=np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("name", "grid", "threads", "axis", "most"),
    [
        ("host", (2**31, 1, 1), 32, "x", 2**31 - 1),
        ("host", (1, 65_536, 1), 32, "y", 65_535),
        ("host", (1, 1, 65_536), 32, "z", 65_535),
        ("gfx1100", (1, 65_536, 1), 32, "y", 65_535),
        ("gfx1100", (2**27, 1, 1), 32, "x", 2**27 - 1),
        ("gfx1100", (2**24, 1, 1), 256, "x", 2**24 - 1),
        ("sm_90", (2**31, 1, 1), 256, "x", 2**31 - 1),
    ],
)
def test_more_blocks_than_a_launch_can_have(
    name: str, grid: tuple[int, int, int], threads: int, axis: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before it is built. One block fewer is not."""
    built: list[str] = []
    monkeypatch.setattr(binding, "kernel", lambda variant, device: built.append(variant.name))
    device: Any = SimpleNamespace(arch=arch(name))
    views = {n: View(64, (10,), "f32", True) for n in ("x", "out")}

    def prepared(blocks: tuple[int, int, int]) -> Any:
        variant = own(grid=lambda v, s: blocks, block=threads)
        return binding.prepare(binding.bind(variant, views, m=0, eps=0, blocks=1), device)

    at = "xyz".index(axis)
    message = f"own: the grid has {grid[at]:,} blocks in {axis}; required: at most {most:,}.*Split the call"
    with pytest.raises(InputError, match=message):
        prepared(grid)
    assert not built
    largest = tuple(most if i == at else blocks for i, blocks in enumerate(grid))
    assert prepared(largest).grid == largest


def test_a_grid_that_grows_too_large_in_a_plan_is_refused_and_the_plan_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    call, out = verify_call(), np.zeros((ROWS, HEADS, HEAD_DIM), np.float32)
    plan = hk.plan(request(logical_ctx=CTX + 37), "host")
    plan.run(**call, out=out, ctx=40)
    want = out.copy()
    monkeypatch.setattr(binding, "MOST_BLOCKS", (3, 65_535, 65_535))
    with pytest.raises(InputError, match="the grid has 4 blocks in x; required: at most 3"):
        plan.run(**call, out=out, ctx=41)
    monkeypatch.undo()
    out[:] = np.nan
    plan.run(**call, out=out, ctx=40)
    assert np.array_equal(out, want)


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [5, object(), ["host"]], ids=["number", "object", "list"])
def test_what_is_no_device(device: Any) -> None:
    message = "device is .*; required: "
    with pytest.raises(InputError, match=message):
        hk.device(device)
    with pytest.raises(InputError, match=message):
        hk.attend(**verify_call(), device=device)
    with pytest.raises(InputError, match=message):
        hk.plan(request(), device)
    with pytest.raises(InputError, match=message):
        hk.launch(DRAFT, device, **draft_call(), out=np.zeros(0), scale=1.0, window=1, causal=0)


# ---- positions and ctx -----------------------------------------------------------------------------------------------


def test_ctx_with_positions_in_host_memory() -> None:
    """`attend` and a plan say the same: a row beyond it is refused, and it is what the launch covers."""
    call, out = verify_call(), np.full((ROWS, HEADS, HEAD_DIM), 123.0, np.float32)
    plan = hk.plan(request(logical_ctx=CTX + 30), "host", capacity=CTX + 37)
    for run in (hk.attend, plan.run):
        with pytest.raises(InputError, match="positions see 40 keys; the launch covers 39"):
            run(**call, out=out, ctx=39)
        with pytest.raises(InputError, match=r"ctx is 78; required: 0 .. 7[07]"):
            run(**call, out=out, ctx=78)
        with pytest.raises(InputError, match=r"ctx is -1; required: 0 .. 7[07]"):
            run(**call, out=out, ctx=-1)
    assert (out == 123.0).all()
    seen: list[Decision] = []
    for ctx in (None, 40, 60):
        assert worst_row(hk.attend(**call, ctx=ctx, on_decision=seen.append), hk.reference.attend(**call)) < 1e-5
        plan.run(**call, out=out, ctx=ctx)
        assert worst_row(out, hk.reference.attend(**call)) < 1e-5
    assert [decision.request.logical_ctx for decision in seen] == [40, 40, 60]


def test_a_tree_is_held_against_ctx_by_what_it_covers() -> None:
    """Not by its positions: every row sees the whole tree."""
    call, bias = verify_call(), np.triu(np.full((ROWS, 7), -np.inf, np.float32), 1)
    bias[:, 0] = 0
    want = hk.reference.attend(**call, tree_bias=bias)
    plan = hk.plan(request(layout="tree", logical_ctx=42), "host", capacity=CTX + 37, block_cols=7)
    out = np.zeros_like(call["q"])
    for run in (hk.attend, plan.run):
        with pytest.raises(InputError, match="positions see 42 keys; the launch covers 41"):
            run(**call, tree_bias=bias, out=out, ctx=41)
        for ctx in (None, 42):
            run(**call, tree_bias=bias, out=out, ctx=ctx)
            assert worst_row(out, want) < 1e-5
        behind = {**call, "positions": call["positions"] + 36}
        with pytest.raises(InputError, match=r"the tree covers cache slots 71 .. 77; required: 0 .. 76"):
            run(**behind, tree_bias=bias, out=out)


def test_a_plan_is_for_a_tree_or_for_none() -> None:
    call, out = verify_call(), np.full((ROWS, HEADS, HEAD_DIM), 123.0, np.float32)
    with pytest.raises(InputError, match=r"tree_bias is given, and <TilePlan .*> is not planned for a tree"):
        hk.plan(request(), "host", capacity=77).run(**call, out=out, tree_bias=np.zeros((ROWS, 5), np.float32))
    with pytest.raises(InputError, match="block_cols is 0 with layout 'tree'; required: above 0 for a tree alone"):
        hk.plan(request(layout="tree"), "host", capacity=77)
    with pytest.raises(InputError, match="block_cols is 3 with layout 'chain'"):
        hk.plan(request(), "host", capacity=77, block_cols=3)
    with pytest.raises(InputError, match=r"window is 7; <TilePlan .*> is planned for causal rows"):
        planned(out, window=7)
    with pytest.raises(InputError, match=r"window is 0; <TilePlan .*> is planned for window rows"):
        planned_window(out)
    assert (out == 123.0).all()


# ---- nothing to write ------------------------------------------------------------------------------------------------


def write_call(**changes: Any) -> dict[str, Any]:
    legal: dict[str, Any] = {name: np.ones((2, 2, 64), np.float32) for name in ("k", "v")}
    legal |= {name: np.full((9, 2, 2, 34), 7, np.uint8) for name in ("k_cache", "v_cache")}
    return {**legal, "positions": np.array([0, 1], np.int32), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({name: np.zeros((0, 2, 64), np.float32) for name in ("k", "v")}, "k has 0 rows; required: at least one row"),
        ({"k": np.zeros((), np.float32)}, r"k has shape \(\); required: 3 dimensions"),
        ({"k_cache": np.zeros((), np.uint8)}, r"k_cache has shape \(\); required: 4 dimensions"),
        ({"v_cache": np.zeros((9, 2, 2, 33), np.uint8)}, "v_cache has shape .*required: the shape of k_cache"),
        ({name: np.zeros((9, 1, 2, 34), np.uint8) for name in ("k_cache", "v_cache")}, "required: the 2 KV heads of k"),
        ({name: np.zeros((9, 2, 2, 33), np.uint8) for name in ("k_cache", "v_cache")}, "a last extent of 34"),
        (
            {"positions": np.zeros((0,), np.int32)},
            r"positions has dtype int32 and shape \(0,\); required",
        ),
    ],
)
def test_kv_writes_that_are_none(changes: dict[str, Any], message: str) -> None:
    call = write_call(**changes)
    with pytest.raises(InputError, match=message):
        hk.kv_write(**call)
    assert not (call["v_cache"] == 8).any()


# ---- where arrays lie ------------------------------------------------------------------------------------------------


def over(other: Array, like: Array, offset: int) -> Array:
    """An array like another, in the memory of `other` from a number of bytes before (or behind) its start on."""
    base = other.base
    assert isinstance(base, np.ndarray)
    start = other.ctypes.data - base.ctypes.data + offset
    placed: Array = base[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
    return placed


def roomy(call: dict[str, Array]) -> dict[str, Array]:
    """The same arrays, each in the middle of memory that is larger than any of them."""
    room = -(-max(array.nbytes for array in call.values()) // 64) * 64 + 64
    found = {}
    for name, array in call.items():
        base = np.zeros(2 * room + array.nbytes, np.uint8)
        found[name] = base[room : room + array.nbytes].view(array.dtype).reshape(array.shape)
        found[name][...] = array
    return found


def run_verify(out: Array, call: dict[str, Array]) -> None:
    hk.attend(**call, out=out)


def run_plan(out: Array, call: dict[str, Array]) -> None:
    tree = {"layout": "tree", "block_cols": 5} if "tree_bias" in call else {"layout": "chain", "block_cols": 0}
    asked = request(layout=tree["layout"])
    hk.plan(asked, "host", capacity=len(call["k_cache"]), block_cols=tree["block_cols"]).run(**call, out=out)


def run_draft(out: Array, call: dict[str, Array]) -> None:
    hk.draft_attend(**call, out=out)


def run_draft_rows(out: Array, call: dict[str, Array]) -> None:
    draft_attend_rows(hk.device("host"), **call, out=out)


def run_launch(out: Array, call: dict[str, Array]) -> None:
    hk.launch(DRAFT, "host", **call, out=out, scale=0.1, window=30, causal=0)


def with_tree(call: dict[str, Array]) -> dict[str, Array]:
    return {**call, "tree_bias": np.zeros((ROWS, 5), np.float32)}


CALLS = [
    (run_verify, verify_call),
    (run_verify, lambda: with_tree(verify_call())),
    (run_plan, verify_call),
    (run_plan, lambda: with_tree(verify_call())),
    (run_draft, draft_call),
    (run_draft_rows, draft_call),
    (run_launch, draft_call),
]
IDS = ["attend", "attend-tree", "plan", "plan-tree", "draft", "draft-rows", "launch"]


@pytest.mark.parametrize(("run", "make"), CALLS, ids=IDS)
def test_an_output_that_overlaps_an_input_is_refused(
    run: Callable[..., None], make: Callable[[], dict[str, Array]]
) -> None:
    """By one element at either end, and where it lies inside; beside it, it is right."""
    call = roomy(make())
    before = {name: array.copy() for name, array in call.items()}
    like = np.zeros((ROWS, HEADS, HEAD_DIM), np.float32)
    for name, array in call.items():
        inside = 0 if name != "q" else 4
        for offset in (4 - like.nbytes, inside, -(-array.nbytes // 4) * 4 - 4):
            with pytest.raises(InputError, match=f"^out shares [0-9,]+ bytes with {name}, and is written; required"):
                run(over(array, like, offset), call)
        for offset in (-like.nbytes, -(-array.nbytes // 4) * 4):
            out = over(array, like, offset)
            run(out, call)
            assert np.isfinite(out).all()
            assert out.any()
    assert all(np.array_equal(array, before[name]) for name, array in call.items())


def test_caches_that_overlap_are_not_written() -> None:
    call = roomy(write_call())
    before = {name: array.copy() for name, array in call.items()}
    with pytest.raises(InputError, match=r"^k_cache shares 1,224 bytes with v_cache, and is written"):
        hk.kv_write(**{**call, "v_cache": call["k_cache"]})
    for written in ("k_cache", "v_cache"):
        for name in set(call) - {written}:
            for offset in (4 - call[written].nbytes, 0, call[name].nbytes - 4):
                first, second = sorted((written, name)) if name.endswith("cache") else (written, name)
                with pytest.raises(InputError, match=f"^{first} shares [0-9,]+ bytes with {second}, and is written"):
                    hk.kv_write(**{**call, written: over(call[name], call[written], offset)})
    assert all(np.array_equal(array, before[name]) for name, array in call.items())
    hk.kv_write(**{**call, "v": call["k"]})  # what is read may be the same
    assert np.array_equal(call["k_cache"], call["v_cache"])


def test_caches_that_are_only_read_may_be_the_same() -> None:
    call = verify_call()
    both = {**call, "v_cache": call["k_cache"]}
    assert worst_row(hk.attend(**both), hk.reference.attend(**both)) < 1e-5


@pytest.fixture(scope="module")
def all_open(_own_cache: None) -> Iterator[None]:
    with opened(128, 4, 2):
        yield


VERIFY_ROUTES = ["verify_mma", "verify_gqa", "rows8", "rows4", "wmma_prefill", "tile_batched"]
DRAFT_ROUTES = ["dflash_n64", "dflash_m32", "dflash_m16", "dflash_sliding", "dflash_scalar"]


@pytest.mark.parametrize("order", [None, 3])
@pytest.mark.parametrize("route", VERIFY_ROUTES)
def test_the_output_may_be_the_queries(route: str, order: int | None, all_open: None) -> None:
    """24 rows: more than one group of every kernel, and two sub-batches of partials."""
    i = inputs(Case(24, 140, 4, 2, 128))
    call = {"k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}
    device = HostDevice(thread_order=order)
    seen: list[Decision] = []
    want = hk.attend(i.q.copy(), **call, route=route, device=device, on_decision=seen.append)
    assert seen[0].route == route
    assert worst_row(want, hk.reference.attend(i.q, **call)) < 2e-3
    q = i.q.copy()
    hk.attend(q, **call, route=route, device=device, out=q)
    assert np.array_equal(q, want)


@pytest.mark.parametrize("masked", ["window", "tree"])
def test_the_output_may_be_the_queries_of_masked_rows(masked: str) -> None:
    call = verify_call()
    options = {"window": {"window": 9}, "tree": {"tree_bias": np.zeros((ROWS, 5), np.float32)}}[masked]
    want, q = hk.attend(**call, **options), call["q"].copy()
    hk.attend(**{**call, "q": q}, **options, out=q)
    assert np.array_equal(q, want)


@pytest.mark.parametrize("order", [None, 3])
@pytest.mark.parametrize("route", DRAFT_ROUTES)
def test_the_output_may_be_the_queries_of_a_draft(route: str, order: int | None, all_open: None) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((n, heads, 128), np.float32) for n, heads in ((40, 4), (150, 2), (150, 2)))
    options = {"device": HostDevice(thread_order=order), "route": route, "window": 90 * (route == "dflash_sliding")}
    seen: list[Decision] = []
    want = hk.draft_attend(q, k, v, **options, on_decision=seen.append)
    assert seen[0].route == route
    again = q.copy()
    hk.draft_attend(again, k, v, **options, out=again)
    assert np.array_equal(again, want)
    assert not np.array_equal(again, q)


def test_every_route_is_among_them() -> None:
    assert {route.name for route in hk.dispatch.ROUTES} == {*VERIFY_ROUTES, *DRAFT_ROUTES}


def test_arrays_that_a_plan_refuses_leave_it_as_it_was() -> None:
    """All of them are swapped, or none."""
    call = roomy(verify_call())
    out, other = (np.zeros((ROWS, HEADS, HEAD_DIM), np.float32) for _ in range(2))
    plan: Plan = hk.plan(request(), "host", capacity=77)
    plan.run(**call, out=out)
    want = out.copy()
    read_only = np.zeros_like(out)
    read_only.flags.writeable = False
    swapped = {**call, "k_cache": call["v_cache"], "out": other}
    for wrong, message in [
        ({"q": np.zeros((ROWS, HEADS, 32), np.float32)}, r"q has dtype f32 and shape \(5, 4, 32\); planned for f32"),
        ({"out": read_only}, "out is read-only"),
        ({"out": over(call["q"], out, 4)}, "out shares 5,116 bytes with q"),
    ]:
        with pytest.raises(InputError, match=message):
            plan.run(**{**swapped, **wrong})
        out[:] = np.nan
        plan.run(**call, out=out)
        assert np.array_equal(out, want)
    assert not other.any()
