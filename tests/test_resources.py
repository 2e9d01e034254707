"""The resource report against the compiler's own remarks, and its comparison between builds."""

from __future__ import annotations

import re
import struct

import pytest

from hipfire_kernels.archs import arch
from hipfire_kernels.building.resources import (
    FIELDS,
    IN_MEMORY,
    LABELS,
    Change,
    KernelArg,
    Resources,
    diff,
    occupancy,
    read_args,
    read_resources,
)
from hipfire_kernels.building.toolchains import Compiled
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import InputError, ToolchainError

GFX1100 = arch("gfx1100")

SWEEP = """
#define THREADS {threads}
#define FLOATS {floats}
#define LIVE {live}
extern "C" __attribute__((global, amdgpu_flat_work_group_size(THREADS, THREADS)))
void sweep(const float* x, float* y, int n) {{
    __attribute__((shared)) float lds[FLOATS];
    const int i = __builtin_amdgcn_workitem_id_x();
    float r[LIVE];
#pragma unroll
    for (int j = 0; j < LIVE; ++j) r[j] = x[j * n + i];
    lds[i % FLOATS] = r[0];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    const float a = lds[(i + 1) % FLOATS];
    for (int t = 0; t < n; ++t) {{
#pragma unroll
        for (int j = 0; j < LIVE; ++j) r[j] = r[j] * a + r[(j + 1) % LIVE];
    }}
#pragma unroll
    for (int j = 0; j < LIVE; ++j) y[j * n + i] = r[j];
}}
"""

INDEXED = """
extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, 32)))
void indexed(const int* x, float* y, int n) {
    float r[64];
    for (int j = 0; j < n; ++j) r[x[j] & 63] = y[j];
    y[0] = r[x[n] & 63] + r[x[n + 1] & 63];
}
"""

TWO = """
extern "C" __attribute__((global)) void first(const float* x, float* y, float a, int n, long m) {
    y[n + m] = a * x[n] + __builtin_amdgcn_workgroup_size_x();
}
extern "C" __attribute__((global)) void second(short* x) { *x = 1; }
"""

REMARKS = {
    "vgprs": "VGPRs",
    "scratch_bytes": r"ScratchSize \[bytes/lane\]",
    "occupancy": r"Occupancy \[waves/SIMD\]",
    "vgpr_spills": "VGPRs Spill",
    "sgpr_spills": "SGPRs Spill",
    "lds_bytes": r"LDS Size \[bytes/block\]",
}


def compiled(source: str, name: str = "gfx1100") -> Compiled:
    target = arch(name)
    return choose(target, "clang").compile(source, target, ("-Rpass-analysis=kernel-resource-usage",))


def remarked(log: str) -> dict[str, int]:
    """The figures of the compiler's remark."""
    found = {field: re.search(rf"remark: +{name}: (\d+)", log) for field, name in REMARKS.items()}
    assert all(found.values()), log
    return {field: int(match.group(1)) for field, match in found.items() if match}


@pytest.mark.parametrize("name", ["gfx1100", "gfx1151", "gfx1201"])
@pytest.mark.parametrize(("threads", "floats", "live"), [
    (32, 64, 8),  # max_waves binds
    (32, 2048, 8),  # LDS binds
    (32, 16384, 8),  # one wave on every other SIMD
    (64, 12000, 8),  # LDS does not divide evenly
    (256, 8192, 8),
    (256, 12000, 8),
    (1024, 16384, 8),
    (64, 64, 90),  # registers bind
    (64, 64, 100),
    (64, 64, 130),
    (64, 64, 180),
    (1024, 64, 220),  # spills: 1024 threads leave a lane 192 registers
])  # fmt: skip
def test_figures_equal_the_compilers_remark(name: str, threads: int, floats: int, live: int) -> None:
    built = compiled(SWEEP.format(threads=threads, floats=floats, live=live), name)
    report = read_resources(built.code, arch(name), "sweep").as_dict()
    expected = remarked(built.log)
    assert {field: report[field] for field in expected} == expected
    assert report["max_workgroup"] == threads
    assert (live == 220) == bool(report["vgpr_spills"])


@pytest.mark.parametrize(("key", "field"), [
    (".vgpr_spill_count", "vgpr_spills"),
    (".sgpr_spill_count", "sgpr_spills"),
    (".private_segment_fixed_size", "scratch_bytes"),
])  # fmt: skip
def test_each_kind_of_spill_is_read_alone(key: str, field: str) -> None:
    """A small number of the note is one byte behind its name; both kernels of the object have none."""
    code = compiled(TWO).code
    at = [i + len(key) for i in range(len(code)) if code.startswith(key.encode(), i)]
    assert len(at) == 2
    assert {code[i] for i in at} == {0}
    spilling = bytes(7 if i in at else byte for i, byte in enumerate(code))
    taken, before = read_resources(spilling, GFX1100, "first"), read_resources(code, GFX1100, "first")
    assert getattr(taken, field) == 7
    assert [change.field for change in diff(before, taken)] == [field]
    assert field in IN_MEMORY


def test_scratch_is_not_implied_by_spills() -> None:
    built = compiled(INDEXED)
    report = read_resources(built.code, GFX1100, "indexed")
    assert report.vgpr_spills == report.sgpr_spills == 0
    assert report.scratch_bytes is not None
    assert report.scratch_bytes >= 256
    assert remarked(built.log)["scratch_bytes"] == report.scratch_bytes


@pytest.mark.parametrize(("vgprs", "lds_bytes", "threads", "waves"), [
    (109, 16 * 1024, 64, 4),  # the docstring's
    (109, 0, 64, 12),
    (144, 0, 64, 10),
    (192, 0, 64, 8),
    (0, 0, 32, 16),
    (96, 0, 32, 16),
    (97, 0, 32, 12),
])  # fmt: skip
def test_occupancy_worked_by_hand(vgprs: int, lds_bytes: int, threads: int, waves: int) -> None:
    assert occupancy(GFX1100, vgprs, lds_bytes, threads) == waves


class TestArguments:
    def test_declared_layout(self) -> None:
        args = read_args(compiled(TWO).code, "first")
        assert [(arg.offset, arg.size, arg.kind) for arg in args] == [
            (0, 8, "global_buffer"),
            (8, 8, "global_buffer"),
            (16, 4, "by_value"),
            (20, 4, "by_value"),
            (24, 8, "by_value"),
        ]

    def test_what_the_runtime_adds_is_left_out(self) -> None:
        """`first` reads the workgroup's size, which is a hidden argument."""
        code = compiled(TWO).code
        report = read_resources(code, GFX1100, "first")
        assert report.kernarg_bytes is not None
        assert report.kernarg_bytes > 32
        assert [type(arg) for arg in read_args(code, "second")] == [KernelArg]


class TestRefusals:
    def test_kernel_that_is_not_there(self) -> None:
        with pytest.raises(ToolchainError, match="no kernel 'third'; kernels in it: first, second"):
            read_resources(compiled(TWO).code, GFX1100, "third")

    @pytest.mark.parametrize("code", [b"", b"\x7fELF", b"no object at all"])
    def test_no_code_object(self, code: bytes) -> None:
        with pytest.raises(ToolchainError, match=f"\\({len(code)} bytes\\) is not a code object"):
            read_resources(code, GFX1100, "first")

    def test_object_without_the_note(self) -> None:
        code = bytearray(compiled(TWO).code)
        at = code.index(b"AMDGPU\0")
        code[at - 4 : at] = struct.pack("<I", 33)
        with pytest.raises(ToolchainError, match="kernels in it: none"):
            read_resources(bytes(code), GFX1100, "first")


class TestComparison:
    BASE = Resources(vgprs=100, sgprs=40, vgpr_spills=0, scratch_bytes=0, kernarg_bytes=64, occupancy=12)

    def test_verdicts(self) -> None:
        after = Resources(vgprs=110, sgprs=38, vgpr_spills=0, scratch_bytes=0, kernarg_bytes=72, occupancy=10)
        assert diff(self.BASE, after) == (
            Change("vgprs", 100, 110, "worse"),
            Change("sgprs", 40, 38, "better"),
            Change("kernarg_bytes", 64, 72, "changed"),
            Change("occupancy", 12, 10, "worse"),
        )

    @pytest.mark.parametrize("field", FIELDS)
    def test_what_more_of_each_is(self, field: str) -> None:
        (change,) = diff(Resources(**{field: 8}), Resources(**{field: 9}))
        neither = ("kernarg_bytes", "wavefront", "max_workgroup")
        assert change.verdict == ("better" if field == "occupancy" else "changed" if field in neither else "worse")
        assert field in neither or field in LABELS

    def test_more_waves_are_better(self) -> None:
        (change,) = diff(Resources(occupancy=8), Resources(occupancy=9))
        assert change.verdict == "better"

    def test_a_figure_that_appears(self) -> None:
        assert diff(Resources(), Resources(vgprs=1)) == (Change("vgprs", None, 1, "changed"),)

    def test_same(self) -> None:
        assert diff(self.BASE, Resources.from_dict(self.BASE.as_dict())) == ()

    def test_a_report_of_something_else(self) -> None:
        with pytest.raises(InputError, match="unknown field 'agprs'"):
            Resources.from_dict({"vgprs": 1, "agprs": 2})

    def test_dict_has_every_field(self) -> None:
        assert tuple(Resources().as_dict()) == FIELDS
