"""Every word of the vocabulary: what it computes on the CPU, against numpy and at its edges, and what the compilers of
the GPUs make of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hipfire_kernels as hk
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.args import Arg, Lds, Scalar, Tensor
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import CompileError, DeadlockError, DeviceError, InputError, ToolchainUnavailable
from hipfire_kernels.inspecting import isa, lint, lint_cuda
from hipfire_kernels.running.devices.host import HostDevice

Array = np.ndarray[Any, Any]


def kernel(body: str, *args: Arg, block: int = 32, lds: tuple[Lds, ...] = ()) -> Variant:
    """A kernel with this body, a block for each `block` of its n elements."""
    declared = "".join(f"{{{{ lds.{one.name} }}}}\n" for one in lds)
    family = hk.KernelFamily(
        name="words",
        doc="a block of elements",
        params={},
        entry=lambda v: "words",
        args=lambda v: (*args, Scalar("n", "i32")),
        grid=lambda v, s: (s.n // block, 1, 1),
        block=block,
        lds=lambda v, arch: lds,
        tolerance=hk.Tolerance(0),
        body=f"{{{{ signature }}}} {{\n{declared}const int at = block_x() * {block} + thread();\n{body}\n}}\n",
    )
    return family.variant()


def rows(name: str, dtype: str, count: int) -> Tensor:
    return Tensor(name, dtype, (count, "n"), writes=True)


# ---- arithmetic on f32 ----------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
TINY, HUGE, SUB = 2.0**-126, 3.4028234663852886e38, 2.0**-149
REAL = {
    "sqrt_f32": np.sqrt,
    "floor_f32": np.floor,
    "rcp_f32": lambda x: 1 / x,
    "rsqrt_f32": lambda x: 1 / np.sqrt(x),
    "log2_f32": np.log2,
    "sin_f32": np.sin,
    "cos_f32": np.cos,
    "tanh_f32": np.tanh,
}
"""What each is in float64."""

UNITS = {"sqrt_f32": 0.5, "floor_f32": 0.0, "rcp_f32": 0.5, "rsqrt_f32": 1.5, "log2_f32": 1.0, "tanh_f32": 2.0}
ABSOLUTE = {"sin_f32": 4e-7, "cos_f32": 4e-7}
"""How far the host's results may lie from that: in units of the last place, or absolutely. docs/vocabulary.md too."""

EDGES: dict[str, tuple[tuple[float, float], ...]] = {
    "sqrt_f32": ((0.0, 0.0), (-0.0, -0.0), (INF, INF), (-1.0, NAN), (-INF, NAN), (NAN, NAN), (SUB, 2.0**-74.5)),
    "floor_f32": (
        *((-0.0, -0.0), (-0.5, -1.0), (-SUB, -1.0), (SUB, 0.0), (2.5, 2.0), (-2.5, -3.0), (INF, INF), (-INF, -INF)),
        *((NAN, NAN), (8388609.0, 8388609.0), (-HUGE, -HUGE)),
    ),
    "rcp_f32": (
        *((0.0, INF), (-0.0, -INF), (INF, 0.0), (-INF, -0.0), (NAN, NAN), (SUB, INF), (-SUB, -INF), (-4.0, -0.25)),
        *((HUGE, 0.0), (-HUGE, -0.0), (TINY, 2.0**126), (2.0**126, TINY)),
    ),
    "rsqrt_f32": (
        *((0.0, INF), (-0.0, -INF), (INF, 0.0), (-1.0, NAN), (-INF, NAN), (NAN, NAN), (SUB, INF), (TINY, 2.0**63)),
    ),
    "log2_f32": (
        *((0.0, -INF), (-0.0, -INF), (INF, INF), (-1.0, NAN), (-INF, NAN), (NAN, NAN), (SUB, -INF), (-SUB, -INF)),
        *((TINY, -126.0), (1.0, 0.0)),
    ),
    "sin_f32": ((0.0, 0.0), (INF, NAN), (-INF, NAN), (NAN, NAN)),
    "cos_f32": ((0.0, 1.0), (-0.0, 1.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (SUB, 1.0)),
    "tanh_f32": (
        *((0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (SUB, SUB), (-SUB, -SUB)),
        *((HUGE, 1.0), (-HUGE, -1.0), (20.0, 1.0), (-20.0, -1.0)),
    ),
}


def spread(name: str) -> Array:
    """Numbers over the range of a word, as float32."""
    rng = np.random.default_rng(1)
    either = rng.choice([-1.0, 1.0], 4096)
    drawn = {
        "floor_f32": either * rng.uniform(0, 1000, 4096),
        "rcp_f32": either * 2 ** rng.uniform(-125, 125, 4096),
        "sin_f32": np.r_[rng.uniform(-7, 7, 2048), either[:2048] * 2 ** rng.uniform(-20, 23, 2048)],
        "tanh_f32": np.r_[either[:2048] * 2 ** rng.uniform(-30, 4, 2048), rng.uniform(-1, 1, 2048)],
    }
    drawn["cos_f32"] = drawn["sin_f32"]
    return drawn.get(name, np.r_[2 ** rng.uniform(-126, 127, 2048), rng.uniform(0.5, 2, 2048)]).astype(np.float32)


@pytest.fixture(scope="module")
def computed() -> dict[str, tuple[Array, Array]]:
    """Of each word of `REAL`: numbers, its edges first, and its results."""
    given = np.stack([_padded(name) for name in REAL])
    calls = "\n".join(f"x[{i} * n + at] = {name}(x[{i} * n + at]);" for i, name in enumerate(REAL))
    out = given.copy()
    hk.launch(kernel(calls, rows("x", "f32", len(REAL))), HostDevice(), x=out)
    return {name: (given[i], out[i]) for i, name in enumerate(REAL)}


def _padded(name: str) -> Array:
    edges = np.array([x for x, _ in EDGES[name]], np.float32)
    return np.concatenate([edges, spread(name)[len(edges) :]])


@pytest.mark.parametrize("name", REAL)
def test_f32(name: str, computed: dict[str, tuple[Array, Array]]) -> None:
    given, got = computed[name]
    for i, (x, want) in enumerate(EDGES[name]):
        exact = np.float32(want)
        same = np.isnan(got[i]) if np.isnan(exact) else got[i] == exact and np.signbit(got[i]) == np.signbit(exact)
        assert same, (x, got[i], want)
    given, got = given[len(EDGES[name]) :].astype(np.float64), got[len(EDGES[name]) :].astype(np.float64)
    want = REAL[name](given)
    if name in ABSOLUTE:
        assert np.abs(got - want).max() <= ABSOLUTE[name]
    else:
        assert (np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))).max() <= UNITS[name]


CLAMPS = [(-5.0, -1.0), (5.0, 2.0), (0.5, 0.5), (INF, 2.0), (-INF, -1.0), (NAN, -1.0), (-1.0, -1.0), (2.0, 2.0)]


def test_clamp_and_bits() -> None:
    x = np.zeros((4, 32), np.float32)
    x[0, : len(CLAMPS)] = [given for given, _ in CLAMPS]
    body = """
    const float given = x[at];
    x[n + at] = clamp_f32(given, -1.0f, 2.0f);
    x[2 * n + at] = bits_to_f32(f32_to_bits(given) ^ 0x80000000u);
    x[3 * n + at] = (float)clamp_i32((int)lane() - 16, -3, 4);
    """
    hk.launch(kernel(body, rows("x", "f32", 4)), HostDevice(), x=x)
    assert x[1, : len(CLAMPS)].tolist() == [want for _, want in CLAMPS]
    assert np.array_equal(x[2], -x[0], equal_nan=True)
    assert np.array_equal(x[3], np.clip(np.arange(32) - 16, -3, 4))


BF16 = [
    (0x3F800000, 0x3F80),
    (0x3F808000, 0x3F80),  # a tie, down to even
    (0x3F818000, 0x3F82),  # a tie, up to even
    (0x3F808001, 0x3F81),
    (0x3F807FFF, 0x3F80),
    (0x80000000, 0x8000),
    (0x00000001, 0x0000),
    (0x00008000, 0x0000),
    (0x00018000, 0x0002),
    (0x007FFFFF, 0x0080),  # a subnormal number to a normal one
    (0x7F7F7FFF, 0x7F7F),
    (0x7F7F8000, 0x7F80),  # to infinity
    (0x7F800000, 0x7F80),
    (0xFF800000, 0xFF80),
]
NANS = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF)


def test_bf16() -> None:
    bits = np.array([x for x, _ in BF16] + list(NANS), np.uint32)
    rng = np.random.default_rng(2)
    x = np.concatenate([bits, rng.integers(0, 2**32, 4096 - len(bits), dtype=np.uint32)]).view(np.float32)
    narrow, wide = np.zeros((1, 4096), np.uint16), np.zeros((1, 4096), np.float32)
    variant = kernel(
        "narrow[at] = f32_to_bf16(x[at]); wide[at] = bf16_to_f32(narrow[at]);",
        rows("x", "f32", 1),
        rows("narrow", "bf16", 1),
        rows("wide", "f32", 1),
    )
    hk.launch(variant, HostDevice(), x=x[None], narrow=narrow, wide=wide)
    assert narrow[0, : len(BF16)].tolist() == [want for _, want in BF16]
    nan = np.isnan(x)
    assert np.isnan(wide[0][nan]).all()
    assert np.array_equal(np.signbit(wide[0][nan]), np.signbit(x[nan]))
    assert np.array_equal(narrow[0][~nan], hk.to_bf16(x[~nan]))
    assert np.array_equal(wide[0].view(np.uint32), narrow[0].astype(np.uint32) << 16)


# ---- whole numbers and bits -----------------------------------------------------------------------------------------

WHOLE = (
    0,
    1,
    2,
    3,
    5,
    0x80,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
)


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


PERM = 0x7205
BITS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "popcount_u32": ("popcount_u32(x)", lambda x, y: x.bit_count()),
    "clz_u32": ("clz_u32(x)", lambda x, y: 32 - x.bit_length()),
    "ctz_u32": ("ctz_u32(x)", lambda x, y: (x & -x).bit_length() - 1 if x else 32),
    "reverse_bits_u32": ("reverse_bits_u32(x)", lambda x, y: int(f"{x:032b}"[::-1], 2)),
    "mul_hi_u32": ("mul_hi_u32(x, y)", lambda x, y: x * y >> 32),
    "mul_hi_i32": ("mul_hi_i32((int)x, (int)y)", lambda x, y: signed(x) * signed(y) >> 32),
    "min_u32": ("min_u32(x, y)", min),
    "max_u32": ("max_u32(x, y)", max),
    "min_i32": ("min_i32((int)x, (int)y)", lambda x, y: min(signed(x), signed(y))),
    "max_i32": ("max_i32((int)x, (int)y)", lambda x, y: max(signed(x), signed(y))),
    "clamp_i32": ("clamp_i32((int)x, -5, 70000)", lambda x, y: min(max(signed(x), -5), 70000)),
    "byte_perm": (
        f"byte_perm<{PERM}>(x, y)",
        lambda x, y: sum((y << 32 | x) >> 8 * (PERM >> 4 * i & 7) % 64 << 8 * i & 0xFF << 8 * i for i in range(4)),
    ),
}
"""A call of each, and what it is in Python's whole numbers."""


@pytest.fixture(scope="module")
def counted() -> tuple[Array, Array, Array]:
    """Pairs of whole numbers, and a row of results for each of `BITS`."""
    pairs = [(x, y) for x in WHOLE for y in WHOLE]
    pairs += [tuple(pair) for pair in np.random.default_rng(3).integers(0, 2**32, (-len(pairs) % 32 + 32, 2)).tolist()]
    x, y = np.array(pairs, np.uint32).T.copy()
    out = np.zeros((len(BITS), x.size), np.uint32)
    calls = "".join(f"out[{i} * n + at] = (unsigned)({call});\n" for i, (call, _) in enumerate(BITS.values()))
    body = f"const unsigned x = left[at], y = right[at];\n{calls}"
    variant = kernel(body, rows("left", "u32", 1), rows("right", "u32", 1), rows("out", "u32", len(BITS)))
    hk.launch(variant, HostDevice(), left=x[None], right=y[None], out=out)
    return x, y, out


@pytest.mark.parametrize("name", BITS)
def test_bits(name: str, counted: tuple[Array, Array, Array]) -> None:
    x, y, out = counted
    want = [BITS[name][1](a, b) % 2**32 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert out[list(BITS).index(name)].tolist() == want


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x[at] = byte_perm<0x8123>(1u, 2u);", "byte_perm takes four digits from 0 to 7"),
        ("x[at] = (unsigned)lane_get((short)at, 3);", "lanes exchange values of 4 bytes"),
        ("store_vec(x, Vec<unsigned, 3>());", "a Vec has 2, 4, 8 or 16 bytes"),
        ("x[at] = load_vec<8>(x)[0];", "a Vec has 2, 4, 8 or 16 bytes"),
        ("x[at] = (load_vec<2, 2>(x)[0]);", "alignment of a Vec is a power of two, from its element's to its own"),
        ("x[at] = (load_vec<2, 16>(x)[0]);", "alignment of a Vec is a power of two, from its element's to its own"),
    ],
)
def test_what_cannot_be_compiled_says_why(body: str, message: str) -> None:
    for target in ("host", "gfx1100"):
        with pytest.raises(CompileError, match=message):
            hk.build(kernel(body, rows("x", "u32", 1)), target)


# ---- waves ----------------------------------------------------------------------------------------------------------

WAVES = """
const float x = given[at];
const int own = (int)lane() * 3 - 40, from = (int)(7u * (unsigned)at) - 11;
out[at] = lane_get(x, from);
out[n + at] = lane_get_uniform(x, block_x() + 13);
out[2 * n + at] = wave_scan_sum(x);
out[3 * n + at] = wave_scan_sum_exclusive(x);
whole[at] = lane_get(own, from);
whole[n + at] = lane_get_uniform(own, 31);
whole[2 * n + at] = wave_scan_sum(own);
whole[3 * n + at] = wave_scan_sum_exclusive(own);
whole[4 * n + at] = (int)wave_ballot(x > 0.0f);
whole[5 * n + at] = wave_any(x > 2.0f);
whole[6 * n + at] = wave_all(x > -2.0f);
whole[7 * n + at] = (int)lane_get((unsigned)own, 5);
"""


def scanned(x: Array) -> Array:
    """Sums up to each lane in the order that wave.h states: by rows of 16, then the first row onto the second."""
    sums = x.reshape(-1, 2, 16).copy()
    for step in (1, 2, 4, 8):
        sums[..., step:] = sums[..., step:] + sums[..., :-step]
    sums[:, 1] += sums[:, :1, 15]
    return sums.reshape(-1, 32)


@pytest.mark.parametrize("order", [None, 3])
def test_waves(order: int | None) -> None:
    n = 6 * 32
    x = np.random.default_rng(4).standard_normal(n).astype(np.float32)
    out, whole = np.zeros((4, n), np.float32), np.zeros((8, n), np.int32)
    variant = kernel(WAVES, rows("given", "f32", 1), rows("out", "f32", 4), rows("whole", "i32", 8), block=64)
    hk.launch(variant, HostDevice(thread_order=order), given=x[None], out=out, whole=whole)
    waves, at = x.reshape(-1, 32), np.arange(n).reshape(-1, 32)
    own = np.tile(np.arange(32) * 3 - 40, (6, 1))
    from_ = (7 * at - 11) % 32
    uniform = (at // 64 + 13) % 32
    floats = [np.take_along_axis(waves, from_, 1), np.take_along_axis(waves, uniform, 1), scanned(waves)]
    floats += [np.roll(floats[2], 1, axis=1) * (np.arange(32) > 0)]
    for got, want in zip(out, floats, strict=True):
        assert np.array_equal(got.reshape(-1, 32), want)
    assert np.abs(scanned(waves) - np.cumsum(waves.astype(np.float64), axis=1)).max() < 4e-6
    sums = np.cumsum(own, axis=1)
    votes = ((waves > 0) << np.arange(32)).sum(axis=1).astype(np.uint32).view(np.int32)
    wholes = [np.take_along_axis(own, from_, 1), own[:, 31:], sums, sums - own, votes[:, None]]
    wholes += [(waves > 2).any(axis=1)[:, None], (waves > -2).all(axis=1)[:, None], own[:, 5:6]]
    for got, want in zip(whole, wholes, strict=True):
        assert np.array_equal(got.reshape(-1, 32), np.broadcast_to(want, (6, 32)))


TOGETHER = {
    "lane_get": "lane_get(1.0f, 3)",
    "lane_get_uniform": "lane_get_uniform(1, 3)",
    "wave_scan_sum": "wave_scan_sum(1.0f)",
    "wave_scan_sum_exclusive": "wave_scan_sum_exclusive(1)",
    "wave_ballot": "wave_ballot(true)",
    "wave_any": "wave_any(true)",
    "wave_all": "wave_all(true)",
}


def test_a_part_of_a_wave_is_an_error_at_its_line() -> None:
    branches = "".join(
        f"if (which == {i}) {{\nif (lane() < 31) x[at] = (float){call};\n}}\n"
        for i, call in enumerate(TOGETHER.values())
    )
    variant = kernel(branches, rows("x", "f32", 1), Scalar("which", "i32"))
    for i, call in enumerate(TOGETHER.values()):
        line = 4 + 3 * i
        with pytest.raises(
            DeadlockError, match=rf"waits at body of words:{line}: .*{re.escape(call)}.*no other thread"
        ):
            hk.launch(variant, HostDevice(), x=np.zeros((1, 32), np.float32), which=i)


def test_lanes_that_ask_for_different_lanes_in_one_voice() -> None:
    variant = kernel("x[at] = lane_get_uniform(x[at], lane() / 31);", rows("x", "f32", 1))
    with pytest.raises(
        DeviceError, match=r"lanes of a wave ask for different lanes at body of words:3: 'x\[at\] = lane_get_un"
    ):
        hk.launch(variant, HostDevice(), x=np.zeros((1, 32), np.float32))


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_atomics() -> None:
    body = """
    if (lane() == 0) counts[0] = 0, sums[0] = 0.0f;
    block_sync();
    atomic_add(counts, at);
    atomic_add(sums, 0.5f);
    atomic_add(whole + at % 3, 1);
    atomic_add(real + at % 3, 0.25f);
    before[at] = atomic_add(whole + n - 1, 1);
    for (int i = 0; i < 100; ++i) atomic_add(whole + 4, 1), atomic_add(real + 4, 1.0f);  // where others are at it too
    block_sync();
    if (thread() == 0) atomic_add(whole + 3, counts[0]), atomic_add(real + 3, sums[0]);
    """
    n = 64 * 200
    lds = (Lds("counts", "int", 1), Lds("sums", "float", 1))
    variant = kernel(body, rows("whole", "i32", 1), rows("real", "f32", 1), rows("before", "i32", 1), block=64, lds=lds)
    whole, real, before = np.zeros((1, n), np.int32), np.zeros((1, n), np.float32), np.zeros((1, n), np.int32)
    hk.launch(variant, HostDevice(), whole=whole, real=real, before=before)
    thirds = np.bincount(np.arange(n) % 3)
    assert whole[0, :5].tolist() == [*thirds, n * (n - 1) // 2, 100 * n]
    assert real[0, :5].tolist() == [*(thirds / 4), n / 2, 100 * n]
    assert whole[0, -1] == n
    assert np.array_equal(np.sort(before[0]), np.arange(n))  # each came once


VECS = [
    (dtype, size // width)
    for dtype, width in (("u8", 1), ("bf16", 2), ("f32", 4), ("f64", 8), ("i64", 8))
    for size in (2, 4, 8, 16)
    if size >= width
]


def test_vectors() -> None:
    """Each type and width through LDS to where it came from, and between addresses that are only an element's."""
    args = [rows(f"x_{dtype}", dtype, 1) for dtype in dict(VECS)]
    lines = []
    for i, (dtype, count) in enumerate(VECS):
        x, staged, own = f"x_{dtype}", f"(decltype(&x_{dtype}[0]))staged + {count} * lane()", f"{count} * at"
        lines += [
            f"if (which == {i} && {own} < n - {count}) {{",
            f"    auto v = load_vec<{count}>({x} + {own}); v[0] += 1; v[{count - 1}] += 2;",
            f"    store_vec({staged}, v);",
            f"    store_vec({x} + {own}, load_vec<{count}>({staged}));",
            "}",
            f"if (which == {len(VECS) + i} && at == 0)",
            f"    store_vec<sizeof({x}[0])>({x} + n - {count} - 1, load_vec<{count}, sizeof({x}[0])>({x} + 1));",
        ]
    variant = kernel("\n".join(lines), *args, Scalar("which", "i32"), lds=(Lds("staged", "unsigned char", 512),))
    n = 128
    for i, (dtype, count) in enumerate(VECS):
        arrays = {f"x_{name}": _sixteen(n, name) for name in dict(VECS)}
        want = arrays[f"x_{dtype}"].copy()
        edited = want[0, : (n - 1) // count * count].reshape(-1, count)
        edited[:, 0] += 1
        edited[:, -1] += 2
        hk.launch(variant, HostDevice(), which=i, **arrays)
        assert np.array_equal(arrays[f"x_{dtype}"], want), (dtype, count)
        want[0, n - count - 1 : n - 1] = want[0, 1 : 1 + count]
        hk.launch(variant, HostDevice(), which=len(VECS) + i, **arrays)
        assert np.array_equal(arrays[f"x_{dtype}"], want), (dtype, count)


def _sixteen(n: int, dtype: str) -> Array:
    """[1, n] of small numbers, at a multiple of 16."""
    kind = {"u8": "u1", "bf16": "u2", "f32": "f4", "f64": "f8", "i64": "i8"}[dtype]
    raw = np.zeros(n * 8 + 16, np.uint8)
    array = raw[-raw.ctypes.data % 16 :][: n * np.dtype(kind).itemsize].view(kind).reshape(1, n)
    array[:] = np.arange(n) % 100
    return array


def test_a_vector_at_an_address_it_must_not_have() -> None:
    body = """
    if (which == 0) x[at] = load_vec<4>(x + 4 * lane() + 2)[0];
    if (which == 1) store_vec(x + 4 * lane() + 2, Vec<unsigned short, 4>());
    if (which == 2) x[at] = load_vec<4, 4>(x + 4 * lane() + 2)[0];
    if (which == 3) store_vec<2>(x + 4 * lane() + 1, Vec<unsigned short, 4>());
    """
    variant = kernel(body, rows("x", "bf16", 1), Scalar("which", "i32"))
    for which, call in enumerate(("load_vec<4>(x", "store_vec(x", "", "")):
        launch = lambda: hk.launch(variant, HostDevice(), x=_sixteen(256, "bf16"), which=which)  # noqa: B023, E731
        if not call:
            launch()
            continue
        said = rf"words, block \(0, 0, 0\), thread 0: the address is not a multiple of 8 at body of words:{4 + which}: "
        with pytest.raises(DeviceError, match=rf"{said}.*{re.escape(call)}.*Tensor\(align"):
            launch()


# ---- what the compilers make of it ----------------------------------------------------------------------------------

X, AT, OUT, WHOLE_OUT = "x[at]", "i[at]", "out[at]", "whole[at]"
CODE = {
    "sqrt_f32": (f"{OUT} = sqrt_f32({X});", "v_s(qrt|_sqrt)_f32"),
    "floor_f32": (f"{OUT} = floor_f32({X});", "v_floor_f32"),
    "rcp_f32": (f"{OUT} = rcp_f32({X});", "v_rcp_f32"),
    "rsqrt_f32": (f"{OUT} = rsqrt_f32({X});", "v_rsq_f32"),
    "log2_f32": (f"{OUT} = log2_f32({X});", "v_log_f32"),
    "sin_f32": (f"{OUT} = sin_f32({X});", "^(?!.*v_fract).*v_rndne_f32.*v_sin_f32"),
    "cos_f32": (f"{OUT} = cos_f32({X});", "^(?!.*v_fract).*v_rndne_f32.*v_cos_f32"),
    "tanh_f32": (f"{OUT} = tanh_f32({X});", "v_exp_f32.*v_rcp_f32"),
    "clamp_f32": (
        f"{OUT} = clamp_f32({X}, -1.0f, {X} + 3.0f);",
        "v_max_(num_)?f32.*v_min_(num_)?f32|v_maxmin_(num_)?f32",
    ),
    "popcount_u32": (f"{WHOLE_OUT} = popcount_u32((unsigned){AT});", "v_bcnt_u32_b32"),
    "clz_u32": (f"{WHOLE_OUT} = clz_u32((unsigned){AT});", "v_clz_i32_u32"),
    "ctz_u32": (f"{WHOLE_OUT} = ctz_u32((unsigned){AT});", "v_ctz_i32_b32"),
    "reverse_bits_u32": (f"{WHOLE_OUT} = (int)reverse_bits_u32((unsigned){AT});", "v_bfrev_b32"),
    "mul_hi_i32": (f"{WHOLE_OUT} = mul_hi_i32({AT}, whole[0]);", "v_mul_hi_i32"),
    "mul_hi_u32": (f"{WHOLE_OUT} = (int)mul_hi_u32((unsigned){AT}, 12345u);", "v_mul_hi_u32"),
    "min_i32": (f"{WHOLE_OUT} = min_i32({AT}, n);", "v_min_i32"),
    "max_i32": (f"{WHOLE_OUT} = max_i32({AT}, n);", "v_max_i32"),
    "min_u32": (f"{WHOLE_OUT} = (int)min_u32((unsigned){AT}, (unsigned)n);", "v_min_u32"),
    "max_u32": (f"{WHOLE_OUT} = (int)max_u32((unsigned){AT}, (unsigned)n);", "v_max_u32"),
    "clamp_i32": (f"{WHOLE_OUT} = clamp_i32({AT}, -3, 70);", "v_med3_i32"),
    "byte_perm": (f"{WHOLE_OUT} = (int)byte_perm<0x7205>((unsigned){AT}, (unsigned)n);", "v_perm_b32"),
    "lane_get": (f"{OUT} = lane_get({X}, {AT});", "ds_bpermute_b32"),
    "lane_get_uniform": (f"{OUT} = {X} - lane_get_uniform({X}, n);", "v_readlane_b32"),
    "wave_scan_sum": (f"{OUT} = wave_scan_sum({X});", "(v_add_f32_dpp.*row_shr.*){4}v_readlane_b32"),
    "wave_scan_sum_exclusive": (f"{OUT} = wave_scan_sum_exclusive({X});", "(v_add_f32_dpp.*row_shr.*){4}v_mov_b32_dpp"),
    "wave_ballot": (f"{WHOLE_OUT} = (int)wave_ballot({X} > 1.0f);", "v_cmp_lt_f32"),
    "wave_any": (f"{WHOLE_OUT} = wave_any({X} > 1.0f);", "v_cmp_lt_f32.*s_cmp|v_cmp_lt_f32.*s_cselect"),
    "wave_all": (f"{WHOLE_OUT} = wave_all({X} > 1.0f);", "v_cmp_lt_f32.*s_cmp|v_cmp_lt_f32.*s_cselect"),
    "atomic_add f32": (f"atomic_add(out + {AT}, {X});", "global_atomic_add_f32"),
    "atomic_add f32 with what was there": (
        f"{OUT} = atomic_add(&out[{AT}], {X});",
        "global_atomic_add_f32 .*(glc|RETURN)",
    ),
    "atomic_add i32": (f"atomic_add(whole + {AT}, n);", "global_atomic_add_u32"),
    "atomic_add f32 in LDS": (f"atomic_add(shared + {AT}, {X}); block_sync(); {OUT} = shared[lane()];", "ds_add_f32"),
    "atomic_add i32 in LDS": (f"atomic_add(count + {AT}, 3); block_sync(); {WHOLE_OUT} = count[lane()];", "ds_add_u32"),
    "load_vec": (f"store_vec(out + 4 * at, load_vec<4>(x + 4 * {AT}));", "global_load_b128.*global_store_b128"),
    "load_vec of 8 bytes": (
        f"store_vec(out + 2 * at, load_vec<2>(x + 2 * {AT}));",
        "global_load_b64.*global_store_b64",
    ),
    "load_vec of bytes": (
        f"const auto v = load_vec<16, 2>(codes + 34 * {AT} + 2); for (int k = 0; k < 16; ++k) {WHOLE_OUT} += v[k];",
        "global_load_b128",
    ),
    "load_vec from LDS": (
        f"shared[lane()] = {X}; block_sync(); store_vec(out + 4 * at, load_vec<4>(shared + {AT}));",
        "ds_load_b128",
    ),
    "f32_to_bf16": (f"half[at] = f32_to_bf16({X});", "v_bfe_u32.*v_add3_u32.*global_store_d16_hi_b16"),
    "bf16_to_f32": (f"{OUT} = bf16_to_f32(half[at]);", "global_load_(u16|d16_b16|d16_hi_b16)"),
    "bits": (f"{WHOLE_OUT} = (int)f32_to_bits({X}); {OUT} = bits_to_f32((unsigned){AT});", "global_store_b32"),
}
"""A use of each word, and what is in its code on gfx11 and gfx12."""

_ARGS = (
    Tensor("x", "f32", ("n",), align=16),
    Tensor("i", "i32", ("n",)),
    Tensor("codes", "u8", ("n",), align=2),
    Tensor("out", "f32", ("n",), writes=True, align=16),
    Tensor("whole", "i32", ("n",), writes=True),
    Tensor("half", "bf16", ("n",), writes=True),
)
_LDS = (Lds("count", "int", 33), Lds("shared", "float", 64, align=16))
_QUIET = "(void)n; (void)shared; (void)count; (void)half; (void)codes; (void)whole; (void)out; (void)i; (void)x;\n"


def use(name: str) -> Variant:
    return kernel(_QUIET + CODE[name][0], *_ARGS, lds=_LDS)


def _lines(assembly: str) -> str:
    """The instructions of the kernel, on one line."""
    body = assembly[assembly.index("\nwords:") : assembly.index(".Lfunc_end0:")]
    code = (line.partition(";")[0].strip() for line in body.splitlines())
    return " ".join(line for line in code if line and not line.startswith((".", "words:")))


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("target", ["gfx1100", "gfx1201"])
def test_machine_code(name: str, target: str) -> None:
    text = choose(arch(target)).assembly(use(name).source(target), arch(target), lint.WARNINGS)
    code = _lines(text)
    assert re.search(CODE[name][1], code), code
    assert not re.search(r"s_swappc|s_call|s_setpc|flat_|scratch_", code), code
    counts = isa.parse(text, "words", target).totals
    assert counts["flat"] == counts["scratch"] == 0
    if "atomic" in name:
        assert not re.search(r"cmpswap|s_cbranch_vcc|src_shared_base", code), code


def test_a_wide_lds_array_is_placed_for_it() -> None:
    """On NVIDIA an array lies where its element may; the others place each at a multiple of 16 anyway."""
    for target in ("gfx1100", "sm_90", "host"):
        assert "SHARED_ALIGNED(16, float, shared, 64, 144);" in use("load_vec").source(target)
    assert "__shared__ __align__(align) type name[count]" in use("load_vec").source("sm_90")
    for align in (0, 3, 32):
        with pytest.raises(InputError, match=f"LDS array a has align={align}; required: a power of two up to 16"):
            kernel("", rows("x", "f32", 1), lds=(Lds("a", "float", 4, align=align),))


def test_the_nvidia_dialect_by_clang() -> None:
    """Syntax and warnings; NVRTC compiles it where there is one."""
    parts = [f"{{ {body} }}" for body, _ in CODE.values()]
    variant = kernel(_QUIET + "\n".join(parts), *_ARGS, lds=_LDS)
    assert lint_cuda.complaints(variant.source("sm_90"), (*lint.WARNINGS, "-Wcast-align")) == ""


SASS = {
    "sqrt_f32": r"MUFU\.RSQ",
    "floor_f32": r"FRND\.FLOOR",
    "rcp_f32": r"MUFU\.RCP",
    "rsqrt_f32": r"MUFU\.RSQ",
    "log2_f32": r"MUFU\.LG2",
    "sin_f32": r"FRND .*MUFU\.SIN",
    "cos_f32": r"FRND .*MUFU\.COS",
    "tanh_f32": r"MUFU\.EX2.*MUFU\.RCP",
    "clamp_f32": "FMNMX.*FMNMX",
    "popcount_u32": "POPC",
    "clz_u32": "FLO",
    "ctz_u32": "BREV.*FLO",
    "reverse_bits_u32": "BREV",
    "mul_hi_i32": r"IMAD\.(WIDE|HI)",
    "mul_hi_u32": r"IMAD\.(WIDE|HI)\.U32",
    "min_i32": "MNMX",
    "max_i32": "MNMX",
    "min_u32": r"MNMX\.U32",
    "max_u32": r"MNMX\.U32",
    "clamp_i32": "MNMX.*MNMX",
    "byte_perm": "PRMT",
    "lane_get": r"SHFL\.IDX",
    "lane_get_uniform": r"SHFL\.IDX",
    "wave_scan_sum": r"(SHFL\.UP.*){4}SHFL\.IDX",
    "wave_scan_sum_exclusive": r"(SHFL\.UP.*){5}SHFL\.IDX",
    "wave_ballot": "VOTE",
    "wave_any": r"VOTE\.ANY",
    "wave_all": r"VOTE\.ALL",
    "atomic_add f32": r"RED.*ADD\.F32",
    "atomic_add f32 with what was there": r"ATOMG.*ADD\.F32",
    "atomic_add i32": r"RED.*ADD\.",
    "atomic_add f32 in LDS": "ATOMS",
    "atomic_add i32 in LDS": "ATOMS",
    "load_vec": r"LDG\.E\.128.*STG\.E\.128",
    "load_vec of 8 bytes": r"LDG\.E\.64.*STG\.E\.64",
    "load_vec of bytes": r"(LDG\.E\.U16.*){8}",
    "load_vec from LDS": r"LDS\.128",
    "f32_to_bf16": r"F2FP\.BF16",
    "bf16_to_f32": r"LDG\.E\.U16",
    "bits": r"STG\.E",
}


def test_machine_code_of_nvidia() -> None:
    target = arch("sm_90")
    assert list(SASS) == list(CODE)
    for name, pattern in SASS.items():
        try:
            text = choose(target).assembly(use(name).source("sm_90"), target)
        except ToolchainUnavailable as error:
            pytest.skip(str(error))
        code = " ".join(one.text for one in isa.parse(text, "words", "sm_90").instructions)
        assert re.search(pattern, code), (name, code)
        assert not re.search(r"\b(LDL|STL)\b", code), (name, code)


# ---- the words and their table --------------------------------------------------------------------------------------

TEMPLATES = resources.files("hipfire_kernels.templates")
DEFINED = re.compile(r"^__device__ __forceinline__ .*?\b(\w+)\(", re.MULTILINE)
INNER = {"sin_of_turns", "cos_of_turns", "turns_of", "row_up", "wave_sum_rows_step"}


def words(*files: str) -> set[str]:
    return {word for file in files for word in DEFINED.findall((TEMPLATES / file).read_text(encoding="utf-8"))}


def test_every_dialect_has_every_word() -> None:
    gpu = {d: words(f"dialect_{d}.h", f"vocabulary_{d}.h", "wave.h", "vocabulary.h") for d in ("amd", "nvidia")}
    host = words("dialect_host.h", "vocabulary_host.h", "vocabulary.h")
    own = {"codes_of_word", "lane_xor"}  # of NVIDIA's codes; what waves on a GPU are made of
    assert gpu["amd"] - INNER - own == gpu["nvidia"] - INNER - own == host - INNER - own
    assert len(host) > 50


def test_the_table_has_every_word() -> None:
    table = (Path(__file__).parent.parent / "docs" / "vocabulary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b\w+(?=[(<`])", table))
    assert words("dialect_host.h", "vocabulary_host.h", "vocabulary.h") - INNER <= named


def test_every_word_has_its_code_looked_at() -> None:
    new = words("vocabulary_host.h", "vocabulary.h") - INNER
    assert new <= set(re.findall(r"\w+(?=[(<])", " ".join(body for body, _ in CODE.values())))
