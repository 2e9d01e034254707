"""hk.attend, hk.draft_attend, hk.kv_write: results, fall-through, and every bad input refused before a launch."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hipfire_kernels as hk
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.checking.parity import Case, inputs
from hipfire_kernels.dispatch import AttendRequest, calls, counters, evidence
from hipfire_kernels.dispatch.admission import Decision
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.running import attention


def arguments(**changes: Any) -> dict[str, Any]:
    """A legal call: 5 rows, 4 query heads on 2 KV heads, head_dim 64, context 40 in a cache of 77."""
    i = inputs(Case(5, 40, 4, 2, 64))
    legal = {
        "q": i.q.copy(),
        "k_cache": i.k_cache.copy(),
        "v_cache": i.v_cache.copy(),
        "positions": i.positions.copy(),
    }
    return {**legal, **changes}


def expected(call: dict[str, Any]) -> np.ndarray[Any, Any]:
    return hk.reference.attend(**call)


def test_attend_equals_the_oracle() -> None:
    call = arguments()
    assert worst_row(hk.attend(**call), expected(call)) < 1e-5
    out = np.full_like(call["q"], np.nan)
    assert hk.attend(**call, out=out) is out
    assert worst_row(out, expected(call)) < 1e-5


def test_scale_window_and_tree_reach_the_kernel() -> None:
    call = arguments()
    assert worst_row(hk.attend(**call, scale=0.3), hk.reference.attend(**call, scale=0.3)) < 1e-5
    for window in (7, 20):  # the same plan
        assert worst_row(hk.attend(**call, window=window), hk.reference.attend(**call, window=window)) < 1e-5
    bias = np.triu(np.full((5, 5), -np.inf, np.float32), 1)
    bias[4, 3] = -np.inf
    got = hk.attend(**call, tree_bias=bias)
    assert worst_row(got, hk.reference.attend(**call, tree_bias=bias)) < 1e-5


def test_independent_positions() -> None:
    call = arguments(positions=np.array([39, 0, 12, 39, 7], np.int32))
    seen: list[Decision] = []
    assert worst_row(hk.attend(**call, on_decision=seen.append), expected(call)) < 1e-5
    assert seen[0].request.layout == "independent"


def test_more_rows_than_the_partials_hold_go_in_sub_batches() -> None:
    i = inputs(Case(41, 300, 4, 2, 64))
    call = {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}
    assert attention.PARTIALS_ROWS < 41
    assert worst_row(hk.attend(**call), expected(call)) < 1e-5


def test_no_visible_key_is_zero_not_nan() -> None:
    call = arguments(positions=np.full(5, -1, np.int32))
    assert not hk.attend(**call).any()
    empty = arguments(
        positions=np.full(5, -1, np.int32),
        k_cache=np.zeros((0, 2, 2, 34), np.uint8),
        v_cache=np.zeros((0, 2, 2, 34), np.uint8),
    )
    assert not hk.attend(**empty).any()


def test_a_captured_launch_covers_the_capacity() -> None:
    call = arguments()
    assert np.array_equal(hk.attend(**call, capturing=True), hk.attend(**call))


def test_a_plan_runs_at_any_context_it_covers() -> None:
    call = arguments()
    request = AttendRequest(
        arch="host", kv_format="q8_0", head_dim=64, n_heads=4, n_kv_heads=2, rows=5, logical_ctx=77, layout="chain",
        capturing=False, recording=False,
    )  # fmt: skip
    plan = hk.plan(request, hk.device("host"))
    assert plan.decision.route == "tile_batched"
    assert plan.workspace_bytes == 4 * 5 * 4 * 1 * (2 + 64)
    for last in (4, 39, 76):
        call["positions"] = np.arange(last - 4, last + 1, dtype=np.int32)
        call["k_cache"], call["v_cache"] = (np.nan_to_num(hk.dequantize_q8_0(call[n])) for n in ("k_cache", "v_cache"))
        call["k_cache"], call["v_cache"] = (hk.quantize_q8_0(call[n]) for n in ("k_cache", "v_cache"))
        out = np.full_like(call["q"], np.nan)
        assert plan.run(**call, out=out) == "tile_batched"
        assert worst_row(out, expected(call)) < 1e-5
    with pytest.raises(InputError, match=r"q has dtype f32 and shape \(4, 4, 64\); planned for f32 \(5, 4, 64\)"):
        plan.run(**{**call, "q": call["q"][:4]}, out=out)
    with pytest.raises(InputError, match="positions holds 77"):
        plan.run(**{**call, "positions": call["positions"] + 1}, out=out)
    with pytest.raises(InputError, match="the request is for gfx1100, host is host"):
        hk.plan(dataclasses.replace(request, arch="gfx1100"), hk.device("host"))
    with pytest.raises(InputError, match="'draft'; a plan is for 'verify'"):
        hk.plan(dataclasses.replace(request, workload="draft"), hk.device("host"))
    with pytest.raises(NotAdmitted, match="no route may run"):
        hk.plan(dataclasses.replace(request, kv_format="fp8"), hk.device("host"))


def test_a_row_that_sees_more_than_the_launch_covers_is_nan() -> None:
    i = inputs(Case(2, 300, 2, 1, 64))
    call = {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}
    device = hk.device("host")
    plan = attention.TilePlan(
        hk.families()["attention_flash_q8_0_tile_batched"].variant(head_dim=64, mask="causal"),
        device,
        attention.check_verify(device, i.q, i.k_cache, i.v_cache),
        300,
    )
    out = np.zeros_like(i.q)
    plan.run(**call, out=out, ctx=256)
    assert np.isnan(out).all()
    plan.run(**call, out=out, ctx=257)
    assert worst_row(out, expected(call)) < 1e-5
    with pytest.raises(InputError, match=r"ctx is 301; required: 0 .. 300, what the plan's workspace covers"):
        plan.run(**call, out=out, ctx=301)


class Producer:
    """A DLPack producer in host memory that is no numpy array."""

    def __init__(self, array: np.ndarray[Any, Any], device_type: int = 1) -> None:
        self._array, self._device_type = array, device_type

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device_type, 0)


def test_dlpack_producers_in_host_memory_are_taken_without_a_copy() -> None:
    call = arguments()
    want = hk.attend(**call)
    out = np.full_like(want, np.nan)
    produced = {name: Producer(array) for name, array in {**call, "out": out}.items()}
    assert isinstance(hk.attend(**produced), Producer)
    assert np.array_equal(out, want)
    with pytest.raises(InputError, match="k_cache has strides"):
        hk.attend(**{**produced, "k_cache": Producer(call["k_cache"][::2])})
    with pytest.raises(InputError, match="q has dtype f64"):
        hk.attend(**{**produced, "q": Producer(call["q"].astype(np.float64))})
    with pytest.raises(InputError, match="q is on DLPack device type 8"):
        hk.attend(**{**produced, "q": Producer(call["q"], 8)}, device="host")
    with pytest.raises(InputError, match="the device of a Producer cannot be found"):
        hk.attend(**{**produced, "q": Producer(call["q"], 8)})


@pytest.mark.parametrize("shape", [(0, 4, 1, 66), (5, 4, 0, 66), (5, 3, 1, 66), (5, 4, 1, 64)])
def test_a_workspace_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    call = arguments()
    device = hk.device("host")
    variant = hk.families()["attention_flash_q8_0_tile_batched"].variant(head_dim=64, mask="causal")
    extents = attention.check_verify(device, call["q"], call["k_cache"], call["v_cache"])
    with pytest.raises(InputError, match="partials has dtype f32 and shape"):
        attention.TilePlan(variant, device, extents, 40, partials=np.zeros(shape, np.float32))


def test_a_context_beyond_the_capacity_is_refused() -> None:
    call = {name: Producer(array) for name, array in arguments().items()}
    with pytest.raises(InputError, match=r"ctx is 78; required: 0 .. 77, the capacity of the cache"):
        hk.attend(**call, ctx=78)


def test_kv_write_then_attend() -> None:
    rng = np.random.default_rng(3)
    k, v, q = (rng.standard_normal((6, 2, 64), np.float32) for _ in range(3))
    k_cache, v_cache = (np.full((9, 2, 2, 34), 0xFF, np.uint8) for _ in range(2))
    positions = np.arange(6, dtype=np.int32)
    hk.kv_write(k, v, k_cache, v_cache, positions)
    assert np.array_equal(k_cache[:6], hk.quantize_q8_0(k))
    assert np.array_equal(v_cache[:6], hk.quantize_q8_0(v))
    assert (k_cache[6:] == 0xFF).all()
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "positions": positions}
    assert worst_row(hk.attend(**call), expected(call)) < 1e-5


def test_offsets_beyond_two_to_the_31() -> None:
    """The caches are 2.3 GB of untouched zero pages each; only the window at their end is written and read."""
    capacity, window = 4_250_000, 90
    caches = [np.zeros((capacity, 2, 8, 34), np.uint8) for _ in range(2)]
    rng = np.random.default_rng(9)
    assert caches[0].nbytes > 2**31
    start = capacity - 200
    rows = rng.standard_normal((200, 2, 256), np.float32)
    hk.kv_write(rows, rows[::-1].copy(), *caches, np.arange(start, capacity, dtype=np.int32))
    tails = [cache[start:].copy() for cache in caches]
    q = rng.standard_normal((1, 2, 256), np.float32)
    got = hk.attend(q, *caches, np.array([capacity - 1], np.int32), window=window)
    want = hk.reference.attend(q, *tails, np.array([199]), window=window)
    assert worst_row(got, want) < 1e-5


def test_a_tree_bias_beyond_two_to_the_31() -> None:
    """The third row of 2^30 columns begins at element 2^31. Of 12 GB of zero pages one is touched: one tile runs."""
    columns, keys = 2**30, 100
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python has a name for from 3.13 on
    pages = mmap.mmap(-1, 3 * columns * 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    bias = np.frombuffer(pages, np.float32).reshape(3, columns)
    rng = np.random.default_rng(2)
    bias[2, :128] = -np.inf
    bias[2, :keys] = rng.standard_normal(keys)
    q = rng.standard_normal((3, 1, 128), np.float32)
    caches = [hk.quantize_q8_0(rng.standard_normal((128, 1, 128), np.float32)) for _ in range(2)]
    partials = np.full((1, 1, 1, 130), np.nan, np.float32)
    hk.launch(
        hk.families()["attention_flash_q8_0_tile_batched"].variant(head_dim=128, mask="tree"),
        "host",
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        positions=np.zeros(3, np.int32),
        partials=partials,
        tree_bias=bias,
        first_row=2,
        batch=1,
        live_tiles=1,
        scale=128**-0.5,
    )
    seen = [cache[:keys] for cache in caches]
    want = hk.reference.attend(q[2:], *seen, np.zeros(1, np.int32), None, bias[2:, :keys].copy())
    assert worst_row(partials[:, :, 0, 2:] / partials[:, :, 0, 1:2], want) < 1e-5


MANY = 65_537
"""More rows than a grid may have blocks in y or z."""


def test_a_cache_write_of_more_rows_than_a_grid_has_in_y() -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((MANY, 1, 32), np.float32) for _ in range(2))
    caches = [np.full((MANY, 1, 1, 34), 0xFF, np.uint8) for _ in range(2)]
    positions = rng.permutation(MANY).astype(np.int32)
    hk.kv_write(k, v, *caches, positions)
    for new, cache in zip((k, v), caches, strict=True):
        assert np.array_equal(cache[positions], hk.quantize_q8_0(new))


def test_a_draft_of_more_rows_than_a_grid_has_in_y() -> None:
    """Each row sees its neighbours; the first and the last ones are held against the oracle."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((MANY, 1, 32), np.float32) for _ in range(3))
    got = hk.draft_attend(q, k, v, window=2)
    assert np.isfinite(got).all()
    for part, held in ((slice(0, 8), slice(0, 6)), (slice(MANY - 8, MANY), slice(2, 8))):
        want = hk.reference.draft_attend(q[part], k[part], v[part], None, 2)
        assert worst_row(got[part][held], want[held]) < 1e-5


@pytest.fixture
def open_rows8() -> Any:
    """The multi-row route, opened on the host."""
    record = dataclasses.replace(evidence.find("gfx1100", "rows8", 256), arch="host")
    with evidence.using([record]):
        counters.reset()
        yield
    counters.reset()


def multirow_call() -> dict[str, Any]:
    i = inputs(Case(8, 4200, 2, 1, 256))
    return {"q": i.q, "k_cache": i.k_cache, "v_cache": i.v_cache, "positions": i.positions}


def test_an_admitted_multirow_route_runs(open_rows8: None) -> None:
    call = multirow_call()
    assert worst_row(hk.attend(**call), expected(call)) < 1e-5
    assert counters.snapshot() == {
        "admitted": {"rows8": 1},
        "refused": {"verify_mma: evidence": 1, "verify_gqa: evidence": 1},
        "routes": {"rows8": 1},
        "drift": {},
    }


def test_drift_runs_the_established_route_once(
    open_rows8: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Admission is broken on purpose: it lets independent rows through to the multi-row kernel."""
    call = multirow_call()
    call["positions"] = call["positions"][::-1].copy()
    launched: list[str] = []
    host = type(hk.device("host"))
    launch = host.launch

    def spy(self: Any, launches: Any, stream: Any = None) -> None:
        launched.extend(one.kernel.artifact.entry for one in launches)
        launch(self, launches, stream)

    monkeypatch.setattr(host, "launch", spy)
    monkeypatch.setattr(calls, "AttendRequest", lambda **fields: AttendRequest(**{**fields, "layout": "chain"}))
    for _ in range(2):
        assert worst_row(hk.attend(**call), expected(call)) < 1e-5
    assert launched == ["attention_flash_q8_0_tile_batched_d8", "attention_flash_reduce_batched_d8"] * 2
    assert counters.snapshot()["routes"] == {"tile_batched": 2}
    assert counters.snapshot()["drift"] == {"rows8: the positions are not consecutive": 2}
    assert len([r for r in caplog.records if "rows8" in r.getMessage()]) == 1


def test_decisions_are_counted_by_route_and_reason() -> None:
    counters.reset()
    for _ in range(2):
        hk.attend(**arguments())
    with pytest.raises(NotAdmitted):
        hk.attend(**arguments(), route="rows4")
    counts = counters.snapshot()
    assert counts["admitted"] == counts["routes"] == {"tile_batched": 2}
    # 5 rows of head_dim 64 at context 40; what was insisted on is counted with all that came before it.
    reasons = {name: counts["refused"][f"rows4: {name}"] for name in ("head_dim", "logical_ctx", "evidence")}
    assert reasons == {"head_dim": 3, "logical_ctx": 3, "evidence": 3}
    assert counts["refused"]["rows8: rows"] == 3
    assert "rows4: rows" not in counts["refused"]
    counters.reset()


def test_asking_for_a_closed_route_raises() -> None:
    with pytest.raises(NotAdmitted, match="evidence"):
        hk.attend(**multirow_call(), route="rows8")


def test_no_route_at_all_raises_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AttendRequest", lambda **fields: AttendRequest(**{**fields, "kv_format": "fp8"}))
    with pytest.raises(NotAdmitted, match=r"(?s)no route may run.*not tile_batched.*kv_format: 'fp8'"):
        hk.attend(**arguments())


def _misaligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype) if x.dtype == np.uint8 else raw[1:].view(np.uint8)[: x.nbytes].view(x.dtype)
    view[...] = x.ravel()
    return view.reshape(x.shape)


BAD_ATTEND: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("q", lambda c: c["q"].astype(np.float64), "q has dtype f64; required: f32"),
    ("q", lambda c: c["q"].astype(np.float16), "q has dtype f16"),
    ("q", lambda c: c["q"][0], "q has shape .*required: 3 dimensions"),
    ("q", lambda c: c["q"][:0], "q has 0 rows"),
    ("q", lambda c: c["q"].transpose(1, 0, 2), "q has strides"),
    ("q", lambda c: c["q"][:, :3].copy(), "n_heads is 3 with 2 KV heads"),
    ("q", lambda c: c["q"][..., :46].copy(), "head_dim is 46; required: a multiple of 32"),
    ("q", lambda c: c["q"][..., :32].copy(), "required: 1 blocks for head_dim 32"),
    ("q", lambda c: c["q"].tolist(), "the device of a list cannot be found; pass device="),
    ("q", lambda c: _misaligned(c["q"]), "q is at an address that is not a multiple of 4"),
    ("k_cache", lambda c: c["k_cache"].view(np.int8), "k_cache has dtype i8; required: u8"),
    ("k_cache", lambda c: c["k_cache"][..., :33].copy(), "last extent of 34"),
    ("k_cache", lambda c: c["k_cache"][0], "k_cache has shape .*required: 4 dimensions"),
    ("k_cache", lambda c: c["k_cache"][::2], "k_cache has strides"),
    ("k_cache", lambda c: _misaligned(c["k_cache"]), "k_cache is at an address that is not a multiple of 2"),
    ("v_cache", lambda c: c["v_cache"][:-1], "v_cache has shape .*required: the shape of k_cache"),
    ("positions", lambda c: c["positions"].astype(np.int64), "positions has dtype int64 .*required: int32"),
    ("positions", lambda c: c["positions"][:-1], r"positions has dtype int32 and shape \(4,\); required: int32 \(5,\)"),
    ("positions", lambda c: c["positions"] + 1000, "positions holds 1039; required: -1 .. 76"),
    ("positions", lambda c: c["positions"] - 100, "positions holds -65; required: -1 .. 76"),
    ("out", lambda c: np.zeros((5, 4, 32), np.float32), "out has dtype f32 and shape"),
    ("out", lambda c: np.zeros((5, 4, 64), np.float64), "out has dtype f64"),
    ("out", lambda c: np.broadcast_to(np.float32(0), (5, 4, 64)), "out has strides"),
    ("tree_bias", lambda c: np.zeros((4, 5), np.float32), r"tree_bias has .*required: f32 \[5\]"),
    ("tree_bias", lambda c: np.zeros((5, 60), np.float32), "the tree covers cache slots 35 .. 94"),
    ("scale", lambda c: float("nan"), "scale is nan"),
    ("window", lambda c: -3, "window is -3; required: 0 for none"),
    ("route", lambda c: "rows9", "route 'rows9' is not known"),
    ("device", lambda c: "tpu:0", "device 'tpu:0' is not known"),
    ("stream", lambda c: 7, "the host device has no streams"),
]


@pytest.mark.parametrize(
    ("name", "make", "message"), BAD_ATTEND, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD_ATTEND)]
)
def test_bad_input_is_refused_and_nothing_is_written(name: str, make: Callable[..., Any], message: str) -> None:
    call = arguments()
    out = np.full_like(call["q"], 123.0)
    with pytest.raises((InputError, NotAdmitted), match=message):
        hk.attend(**{"out": out, **call, name: make(call)})
    assert (out == 123.0).all()


def test_read_only_output_is_refused() -> None:
    out = np.zeros((5, 4, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(InputError, match="out is read-only"):
        hk.attend(**arguments(), out=out)


def test_size_one_dimensions_with_odd_strides_are_contiguous() -> None:
    call = arguments()
    row = call["q"][2:3]
    odd = np.lib.stride_tricks.as_strided(row, row.shape, (17, *row.strides[1:]))
    one = {**call, "positions": call["positions"][2:3]}
    assert np.array_equal(hk.attend(**{**one, "q": odd}), hk.attend(**{**one, "q": row}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": np.array([3, 99], np.int32)}, "positions holds 99; required: 0 .. 8"),
        ({"positions": np.array([-1, 0], np.int32)}, "positions holds -1"),
        ({"positions": np.array([2, 2], np.int32)}, "positions holds 2 twice"),
        ({"positions": np.array([0, 1], np.int64)}, "positions has dtype int64"),
        ({"positions": np.array([0], np.int32)}, r"positions has dtype int32 and shape \(1,\)"),
        ({"k": np.zeros((2, 2, 48), np.float32)}, "head_dim is 48"),
        ({"k": np.full((2, 2, 64), np.nan, np.float32)}, "k holds NaN, infinity"),
        ({"v": np.full((2, 2, 64), 1e9, np.float32)}, "v holds NaN, infinity or a magnitude above"),
        ({"v": np.zeros((2, 1, 64), np.float32)}, "v has shape"),
        ({"v_cache": np.zeros((9, 1, 2, 34), np.uint8)}, "v_cache has shape"),
    ],
)
def test_bad_kv_writes_are_refused(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "k": np.ones((2, 2, 64), np.float32),
        "v": np.ones((2, 2, 64), np.float32),
        "k_cache": np.full((9, 2, 2, 34), 7, np.uint8),
        "v_cache": np.full((9, 2, 2, 34), 7, np.uint8),
        "positions": np.array([0, 1], np.int32),
    }
    with pytest.raises(InputError, match=message):
        hk.kv_write(**{**call, **changes})
    assert (call["k_cache"] == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k": np.zeros((3, 1, 64), np.float32), "v": np.zeros((3, 1, 64), np.float32)},
            "k has 3 keys for 4 query rows",
        ),
        ({"v": np.zeros((5, 1, 64), np.float32)}, "v has shape"),
        ({"k": np.zeros((6, 1, 32), np.float32), "v": np.zeros((6, 1, 32), np.float32)}, "required: the head_dim of q"),
        ({"q": np.zeros((4, 2, 64), np.float64)}, "q has dtype f64"),
        ({"window": -1}, "window"),
        ({"k": np.zeros((6, 64), np.float32)}, "required: .*n_kv_heads"),
    ],
)
def test_bad_draft_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "q": np.zeros((4, 2, 64), np.float32),
        "k": np.zeros((6, 1, 64), np.float32),
        "v": np.zeros((6, 1, 64), np.float32),
    }
    with pytest.raises((InputError, NotAdmitted), match=message):
        hk.draft_attend(**{**call, **changes})
