"""Instructions by class, loop and source line; held against what the compiler itself says about its loops and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from budget import some

from hipfire_kernels import families
from hipfire_kernels.archs import arch
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.authoring.places import Place, Places
from hipfire_kernels.building.builder import Artifact, build
from hipfire_kernels.building.resources import open_elf
from hipfire_kernels.building.toolchains import Compiled, nvrtc
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import ToolchainError, ToolchainUnavailable
from hipfire_kernels.inspecting import isa
from hipfire_kernels.inspecting.flow import Graph, cycles

GFX = """
\t.type\tother,@function
other:
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]
.Lfunc_end0:
kernel:                                 ; @kernel
.Lfunc_begin1:
; %bb.0:
\t.loc\t0 20 51 prologue_end            ; kernel.hip:20:51 @[ kernel.hip:239:40 ]
\ts_load_b128 s[36:39], s[0:1], 0x28
\t.loc\t0 240 37                        ; kernel.hip:240:37
\tglobal_load_b64 v[66:67], v[72:73], off offset:2
.LBB1_1:                                ; =>This Loop Header: Depth=1
\t.loc\t0 7 3                           ; kernel.hip:7:3 @[ kernel.hip:30:9 @[ kernel.hip:241:12 ] ]
\tds_load_b128 v[0:3], v9
\tds_bpermute_b32 v1, v2, v3
.LBB1_2:                                ;   Parent Loop BB1_1 Depth=1
\t.loc\t0 243 3                         ; kernel.hip:243:3
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]
\tv_dual_fmac_f32 v85, v39, v83 :: v_dual_fmac_f32 v88, v64, v69
\ts_cbranch_scc1 .LBB1_2
\t.loc\t0 244 3                         ; kernel.hip:244:3
\tv_add_f32_dpp v68, v73, v68 row_xmask:8
\ts_waitcnt lgkmcnt(0)
\ts_barrier
\t.loc\t0 0 3 is_stmt 0                 ; kernel.hip:0:3
\ts_branch .LBB1_1
.LBB1_4:
\ts_endpgm
.Lfunc_end1:
\tv_exp_f32_e32 v0, v1
"""

SASS = """
//--------------------- .text.kernel --------------------------
        .global         kernel
kernel:
.text.kernel:
\t//## File "/x/kernel.cu", line 49 inlined at "/x/kernel.cu", line 171
\t//## File "/x/kernel.cu", line 171 inlined at "/x/kernel.cu", line 287
\t//## File "/x/kernel.cu", line 287
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P6 LDG.E.CONSTANT R2, desc[UR14][R8.64] ;
.L_x_1:
\t//## File "/x/kernel.cu", line 288
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/                   BRA.DIV ~URZ, `(.L_x_9) ;
.L_x_8:
        /*0040*/                   SHFL.BFLY PT, R10, R53, 0x10, 0x1f ;
        /*0050*/                   LDGSTS.E.128 [R1], desc[UR14][R8.64] ;
        /*0060*/                   LDGDEPBAR ;
        /*0070*/                   HFMA2.MMA R0, -RZ, RZ, 0, 0 ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   LDS R2, [R3] ;
        /*00a0*/                   BRA P0, `(.L_x_1) ;
        /*00b0*/                   EXIT ;
.L_x_9:
        /*00c0*/                   WARPSYNC.COLLECTIVE R70, `(.L_x_8) ;
        /*00d0*/                   BRA `(.L_x_8) ;
.L_x_10:
        /*00e0*/                   BRA `(.L_x_10);
//--------------------- .nv.info --------------------------
        /*00f0*/                   FADD R1, R2, R3 ;
"""

TILE_LOOP = """
typedef _Float16 half16 __attribute__((ext_vector_type(16)));
typedef float float8 __attribute__((ext_vector_type(8)));
extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, 32)))
void kernel(const half16* a, float8* out, int n) {
    __attribute__((shared)) half16 keys[64];
    const int lane = __builtin_amdgcn_workitem_id_x();
    float8 acc = {};
    for (int tile = 0; tile < n; ++tile) {
        keys[lane] = a[tile * 32 + lane];
        __builtin_amdgcn_s_barrier();
        acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(keys[lane ^ 1], keys[lane ^ 2], acc);
        acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(keys[lane ^ 3], keys[lane ^ 4], acc);
    }
    out[lane] = acc;
}
"""


def counted(counts: isa.Counts) -> dict[str, int]:
    return {kind: n for kind, n in counts.items() if n}


class TestFlow:
    @pytest.mark.parametrize(
        ("graph", "expected"),
        [
            ([[]], []),
            ([[0]], [(0, {0})]),
            ([[1], [2], [1, 3], []], [(1, {1, 2})]),
            ([[1], [2, 4], [2, 3], [1], []], [(1, {1, 2, 3}), (2, {2})]),
            ([[1], [2, 3], [1], [1, 4], []], [(1, {1, 2, 3})]),
            ([[1, 2], [2], [1, 3], []], []),
            ([[2], [1], []], []),
            ([[1], [2], [0, 1, 3], []], [(0, {0, 1, 2}), (1, {1, 2})]),
        ],
        ids=["line", "self", "one", "nested", "two latches", "two entries", "out of reach", "one latch, two loops"],
    )
    def test_cycles(self, graph: Graph, expected: list[tuple[int, set[int]]]) -> None:
        assert [(c.header, set(c.blocks)) for c in cycles(graph)] == expected


class TestReading:
    def test_gfx(self) -> None:
        listed = isa.parse(GFX, "kernel", "gfx1100")
        assert counted(listed.totals) == {
            "matrix": 1, "load": 1, "lds": 1, "lane": 2, "vector": 1, "scalar": 1, "branch": 3, "barrier": 1,
            "wait": 1, "all": 12,
        }  # fmt: skip
        assert [(one.at.line, one.body.line) for one in listed.instructions[:4]] == [
            (20, 239),
            (240, 240),
            *[(7, 241)] * 2,
        ]
        outer, inner = listed.loops
        assert (outer.depth, outer.parent, outer.lines, outer.counts["all"]) == (
            1,
            None,
            (Place("kernel.hip", 241), Place("kernel.hip", 244)),
            9,
        )
        assert (inner.depth, inner.parent, inner.lines) == (2, 0, (Place("kernel.hip", 243),) * 2)
        assert counted(inner.counts) == {"matrix": 1, "vector": 1, "branch": 1, "all": 3}

    def test_sass(self) -> None:
        listed = isa.parse(SASS, "kernel", "sm_90")
        assert [(one.at.line, one.body.line) for one in listed.instructions[1:3]] == [(49, 287), (288, 288)]
        (loop,) = listed.loops
        assert counted(loop.counts) == {
            "matrix": 1, "load": 1, "lds": 1, "lane": 1, "vector": 1, "branch": 3, "wait": 1, "all": 9,
        }  # fmt: skip
        assert loop.lines == (Place("kernel.cu", 288),) * 2

    def test_another_function_is_not_read(self) -> None:
        with pytest.raises(ToolchainError, match="has no function 'kern'"):
            isa.parse(GFX, "kern", "gfx1100")

    @pytest.mark.parametrize(
        ("dialect", "kind", "mnemonics"),
        [
            ("amd", "matrix", "v_wmma_i32_16x16x16_iu8 v_swmmac_f32_16x16x32_f16"),
            ("amd", "dot", "v_dot4_i32_iu8 v_dot2_f32_f16 v_dot2acc_f32_f16"),
            ("amd", "load", "global_load_d16_b16 buffer_load_b128 global_load_lds_b32"),
            ("amd", "store", "global_store_b64 buffer_store_b8 global_atomic_add_f32"),
            ("amd", "flat", "flat_load_b32 flat_store_b32 flat_atomic_add_u32"),
            ("amd", "lds", "ds_load_b128 ds_store_2addr_b32 ds_add_f32"),
            ("amd", "lane", "ds_swizzle_b32 v_permlanex16_b32 v_readfirstlane_b32 v_mov_b32_dpp"),
            ("amd", "scratch", "scratch_load_b32 scratch_store_b128"),
            ("amd", "trans", "v_exp_f32_e32 v_s_rcp_f32 v_sqrt_f32_e32"),
            ("amd", "convert", "v_cvt_f32_f16_e32 v_cvt_f32_ubyte3_e32"),
            ("amd", "branch", "s_cbranch_vccnz s_branch s_endpgm"),
            ("amd", "barrier", "s_barrier s_barrier_signal s_barrier_wait"),
            ("amd", "wait", "s_waitcnt s_wait_loadcnt s_delay_alu buffer_gl0_inv global_inv global_wb s_nop"),
            ("amd", "scalar", "s_load_b64 s_mul_i32 s_cselect_b32"),
            ("amd", "vector", "v_dual_mov_b32 v_perm_b32 v_cmp_lt_i32_e32 v_pk_fma_f16"),
            ("nvidia", "matrix", "HMMA.16816.F32 HGMMA.64x96x16.F32 IMMA.16832.S8.S8 QGMMA.64x64x32"),
            ("nvidia", "load", "LDG.E.128 LDGSTS.E.BYPASS UBLKCP.S.G UTMALDG.2D"),
            ("nvidia", "lds", "LDS.64 STS LDSM.16.M88.4 STSM.16 ATOMS.ADD"),
            ("nvidia", "lane", "SHFL.BFLY VOTE.ANY REDUX.SUM R2UR"),
            ("nvidia", "scratch", "LDL.64 STL"),
            ("nvidia", "flat", "LD.E ST.E"),
            ("nvidia", "trans", "MUFU.EX2"),
            ("nvidia", "convert", "I2F.S16 F2F.F32.F16 I2FP.F32.S32"),
            ("nvidia", "branch", "BRA EXIT BSSY BSYNC WARPSYNC.ALL"),
            ("nvidia", "barrier", "BAR.SYNC.DEFER_BLOCKING SYNCS.PHASECHK.TRANS64.TRYWAIT"),
            ("nvidia", "wait", "NOP LDGDEPBAR DEPBAR.LE WARPGROUP.ARRIVE WARPGROUP.DEPBAR"),
            ("nvidia", "scalar", "UIADD3 ULDC.64 LDC S2R USHF.L.U32"),
            ("nvidia", "vector", "FFMA HFMA2.MMA IMAD.WIDE PRMT ISETP.LE.AND"),
        ],
    )
    def test_kinds(self, dialect: str, kind: str, mnemonics: str) -> None:
        assert {m: isa.kind_of(m, dialect) for m in mnemonics.split()} == dict.fromkeys(mnemonics.split(), kind)


def machine_code(made: Artifact | Compiled) -> bytes:
    return bytes(open_elf(made.code).get_section_by_name(".text").data())


def ends() -> Iterator[Variant]:
    """First and last variant of each family."""
    for family in families().values():
        known = list(family.variants())
        yield from dict.fromkeys([known[0], known[-1]])


@pytest.mark.parametrize(
    ("variant", "name"),
    some([(v, name) for v in ends() for name in ("gfx1100", "gfx1201") if v.fits(name)], 12),
    ids=lambda part: getattr(part, "name", part),
)
def test_the_compiler_says_the_same(variant: Variant, name: str) -> None:
    """Its comments have each loop's depth and depth; line tables must not change the code."""
    target, source = arch(name), variant.source(name)
    compiler = choose(target)
    text = compiler.assembly(source, target)
    listed = isa.parse(text, variant.entry, name, source)
    said = re.findall(r"=>\s*(?:This )?(?:Inner )?Loop Header: Depth=(\d+)", text)
    assert sorted(loop.depth for loop in listed.loops) == sorted(map(int, said))
    assert machine_code(compiler.compile(source, target, ("-gline-tables-only",))) == machine_code(build(variant, name))
    assert isa.listing(variant, name) == listed
    texts = Places.of(source).texts
    for loop in listed.loops:
        first, last = loop.lines
        assert first <= last
        assert first.file == last.file
        assert first in texts
        assert last in texts


def test_a_loop_has_the_lines_of_its_source() -> None:
    listed = isa.listing(families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=256), "gfx1100")
    places = Places.of(listed.source)
    assert [places.text(loop.lines[0]) for loop in listed.loops] == [
        "for (int key = 0; key < most; ++key) {",
        "for (; key < least; ++key) {",
        "for (; key < most; ++key) {",
    ]


def test_instructions_of_a_tile_loop() -> None:
    target = arch("gfx1100")
    (loop,) = isa.parse(choose(target).assembly(TILE_LOOP, target), "kernel", "gfx1100").loops
    assert {kind: loop.counts[kind] for kind in ("matrix", "load", "lds", "barrier")} == {
        "matrix": 2, "load": 2, "lds": 10, "barrier": 0,
    }  # fmt: skip
    assert loop.lines == (Place("kernel.hip", 9), Place("kernel.hip", 13))


class TestRefusals:
    def test_no_nvdisasm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if reason := nvrtc.NvrtcToolchain().available(arch("sm_90")):
            pytest.skip(reason)
        monkeypatch.setattr(nvrtc, "_nvdisasm", lambda: None)
        with pytest.raises(ToolchainUnavailable, match="needs nvdisasm, which is neither on the PATH nor"):
            isa.listing(next(ends()), "sm_90", nvrtc.NvrtcToolchain())

    def test_a_nvdisasm_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "nvdisasm"
        program.write_text("#!/bin/sh\necho broken >&2\nexit 4\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        if choose_reason := nvrtc.NvrtcToolchain().available(arch("sm_90")):
            pytest.skip(choose_reason)
        with pytest.raises(ToolchainError, match="exit status 4; broken"):
            isa.listing(next(ends()), "sm_90")

    def test_the_host_has_no_listing(self) -> None:
        with pytest.raises(ToolchainUnavailable, match="host gives no assembly text"):
            isa.listing(next(ends()), "host")


def test_sm_90_through_nvdisasm() -> None:
    reason = nvrtc.NvrtcToolchain().available(arch("sm_90")) or (None if nvrtc._nvdisasm() else "no nvdisasm here")
    if reason:
        pytest.skip(reason)
    listed = isa.listing(families()["attention_flash_q8_0_rows"].variant(rows=8, head_dim=256), "sm_90")
    assert len(listed.loops) == 3
    assert all(loop.counts["load"] >= 2 for loop in listed.loops)
