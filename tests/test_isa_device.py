"""The interpreter's devices: instructions, parity of every family, each check with a kernel that has what it is for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import test_vocabulary as words
from isa_lab import ARCHS, Array, built, edited, forget, instructions, kernel, launch

import hipfire_kernels as hk
from hipfire_kernels import Lds, Tensor, families
from hipfire_kernels.archs import ARCHS as KNOWN
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import matrix_probe
from hipfire_kernels.checking.oracle import check, oracle_of
from hipfire_kernels.errors import DeadlockError, DeviceError, InputError, MemoryFault, UndefinedBehaviour
from hipfire_kernels.interpreting import decode, execution, native, program, table
from hipfire_kernels.running import devices as runtime
from hipfire_kernels.running.devices.isa import IsaDevice

Lines = list[str]


def on(arch: str) -> IsaDevice:
    found = hk.device(f"isa:{arch}")
    assert isinstance(found, IsaDevice)
    return found


# ---- the device -----------------------------------------------------------------------------------------------------


def test_by_name() -> None:
    found = on("gfx1201")
    assert hk.device("isa:gfx1201") is found
    assert (found.name, found.arch.name, found.toolchain) == ("isa:gfx1201", "gfx1201", "clang")
    flushing = hk.device("isa:gfx1100+flush")
    assert isinstance(flushing, IsaDevice)
    assert flushing.driver.mode.flushed
    assert not found.driver.mode.flushed
    assert found.checking(required=True) is found
    assert not any(name.startswith("isa") for name in hk.devices())
    amd = [name for name, row in KNOWN.items() if row.dialect == "amd"]
    assert all(on(name).arch.name == name for name in amd)
    for wrong in (
        "isa",
        "isa:",
        "isa:0",
        "isa:host",
        "isa:sm_90",
        "isa:gfx1201+",
        "isa:gfx1201+undefined",
        "ISA:gfx1201",
    ):
        with pytest.raises(InputError, match="is not known; required: host, hip:N, cuda:N or auto, or isa:ARCH"):
            hk.device(wrong)
    assert runtime.arch_of("isa:gfx1100+flush") == "gfx1100"
    assert runtime.arch_of("host") == "host"


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_machine_and_python_read_the_same() -> None:
    """Codes and numbers are counted by either; layouts are checked by what cffi makes of them."""
    rows = table.rows()
    text = table.part("table.h")
    assert len(rows) == len(re.findall(r"^(?:VECTOR|SCALAR|SPECIAL|MEMORY)\(", text, re.M)) > 300
    assert len({row.name for row in rows}) == len(rows) == len({row.name12 for row in rows})
    sections = {"SOP1", "SOP2", "SOPK", "SOPC", "SOPP", "SMEM", "VOP1", "VOP2", "VOP3", "VOP3P", "VOPC"}
    assert {row.section for row in rows} == sections | {"LDS", "GLOBAL", "MUBUF"}
    findings = table.part("findings.h")
    assert len(table.kinds()) == len(re.findall(r"^(?:NOTE|STOP)\(", findings, re.M))
    library = native.machine()
    for name in ("PAIRED", "CLAMP", "TO_EXEC", "SELECTS", "RETURNS", "APART", "SHIFT", "FROM_F16", "ABS32", "NEGATE16"):
        assert getattr(decode, name) == getattr(library, f"HK_{name}")
    for name in (
        "VECTOR",
        "SCALAR",
        "CONSTANT",
        "WORD",
        "LOW",
        "HIGH",
        "PAIR",
        "MASK",
        "LOADS",
        "SHARED_OPS",
        "STORES",
    ):
        assert getattr(decode, name) == getattr(library, f"HK_{name}")


@pytest.mark.parametrize(
    ("text", "gfx12"),
    [
        ("v_mul_legacy_f32 v0, v1, v2", False),
        ("v_max_num_f32_e32 v0, v1, v2", False),
        ("v_max_f32_e32 v0, v1, v2", True),
        ("v_add_f32_dpp v0, v1, v2 row_newbcast:3 row_mask:0xf bank_mask:0xf", False),
        ("v_add_f32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", False),
        ("v_add_f32_dpp v0, v1, v2 row_xmask:1 row_mask:0x3 bank_mask:0xf bound_ctrl:1", False),
        ("v_add_f32_e64 v0, v1, v2 mul:2", False),
        ("s_waitcnt 0x3f7", False),
        ("flat_load_b32 v0, v[1:2]", True),
        ("scratch_store_b32 off, v0, off", True),
        ("s_mov_b32 s0, src_shared_base", True),
        ("global_load_b32 v0, v1", True),
    ],
)
def test_what_is_not_known_is_refused(text: str, gfx12: bool) -> None:
    with pytest.raises(decode.UnknownInstruction):
        decode.decode(text, gfx12)


def test_forms() -> None:
    def sources(text: str, gfx12: bool = True) -> tuple[decode.Source, ...]:
        return decode.decode(text, gfx12)[0].sources

    S = decode.Source
    assert sources("v_fma_f32 v17, -v14, |s3|, 0.5")[1:] == (
        S(decode.SCALAR, mods=decode.ABS32, reg=3),
        S(decode.CONSTANT, value=0x3F000000),
    )
    assert sources("v_fma_f32 v17, -v14, |s3|, 0.5")[0].mods == decode.NEGATE32
    assert sources("v_cvt_f32_f16_e32 v37, v10.h", False) == (S(decode.VECTOR, 0, decode.SHIFT, 10, decode.HIGH),)
    low, high = sources("v_pack_b32_f16 v8, v8, v11 op_sel:[0,1,0]")
    assert (low.mods, low.needs, high.mods, high.needs) == (0, decode.LOW, decode.SHIFT, decode.HIGH)
    mixed = sources("v_fma_mixlo_f16 v9, v4, -v9, 0 op_sel:[1,0,0] op_sel_hi:[1,0,0]")
    assert [one.mods for one in mixed] == [decode.FROM_F16 | decode.SHIFT, decode.NEGATE32, 0]
    packed = sources("v_pk_add_f16 v33, 0xe480, v33 op_sel_hi:[0,1]")
    assert packed[0] == S(decode.CONSTANT, mods=decode.SWAP_HIGH, value=0xE480)
    (one, two) = decode.decode("v_dual_mov_b32 v1, v2 :: v_dual_cndmask_b32 v2, v1, v3", True)
    assert one.flags & decode.PAIRED
    assert two.sources[2] == S(decode.SCALAR, decode.MASK, reg=106)
    compared = decode.decode("v_cmpx_gt_i32_e64 s49, v0", True)[0]
    assert (compared.flags, compared.mask_reg, compared.result) == (decode.TO_EXEC, decode.NO_REG, decode.NONE)
    assert decode.decode("s_waitcnt vmcnt(3) lgkmcnt(0)", False)[0].wait == (3, 0, -1, -1)
    assert decode.decode("s_wait_storecnt_dscnt 0x102", True)[0].wait == (-1, 2, -1, 1)
    assert decode.decode("ds_load_2addr_stride64_b32 v[0:1], v2 offset1:1", True)[0].offset == (0, 256)
    shifted = decode.decode("v_add_f32_dpp v3, v3, v3 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1", True)[0]
    assert shifted.lanes[:4] == (-1, -1, 0, 1)
    assert shifted.lanes[16:20] == (-1, -1, 16, 17)
    assert sources("s_cmpk_lt_u32 s0, 0xff00", False)[1].value == 0xFFFFFF00  # of which it takes 16 bits


# ---- instructions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHS)
def real(request: pytest.FixtureRequest, host: object) -> dict[str, tuple[Array, Array]]:
    """As `words.computed`, on the interpreter."""
    given = np.stack([words._padded(name) for name in words.REAL])
    calls = "\n".join(f"x[{i} * n + at] = {name}(x[{i} * n + at]);" for i, name in enumerate(words.REAL))
    out = launch(words.kernel(calls, words.rows("x", "f32", len(given))), on(request.param), x=given, n=len(given[0]))
    return {name: (given[i], out["x"][i]) for i, name in enumerate(words.REAL)}


def test_f32(real: dict[str, tuple[Array, Array]]) -> None:
    for name in words.REAL:
        words.test_f32(name, real)


@pytest.mark.parametrize("arch", ARCHS)
def test_whole_numbers(arch: str, host: object) -> None:
    pairs = [(x, y) for x in words.WHOLE for y in words.WHOLE]
    pairs += [tuple(pair) for pair in np.random.default_rng(3).integers(0, 2**32, (-len(pairs) % 32, 2)).tolist()]
    x, y = np.array(pairs, np.uint32).T.copy()
    calls = "".join(f"out[{i} * n + at] = (unsigned)({call});\n" for i, (call, _) in enumerate(words.BITS.values()))
    body = f"const unsigned x = left[at], y = right[at];\n{calls}"
    arrays = [words.rows("left", "u32", 1), words.rows("right", "u32", 1), words.rows("out", "u32", len(words.BITS))]
    got = launch(
        words.kernel(body, *arrays),
        on(arch),
        left=x[None],
        right=y[None],
        out=np.zeros((len(words.BITS), x.size), np.uint32),
    )
    for i, (_, exact) in enumerate(words.BITS.values()):
        want = [exact(a, b) % 2**32 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert got["out"][i].tolist() == want


@pytest.mark.parametrize("arch", ARCHS)
def test_lanes_atomics_and_vectors(arch: str, host: object) -> None:
    """Against the host's answer, on the same kernel."""
    body = """
    count[lane()] = 0;
    shared[lane()] = 0.0f;
    shared[lane() + 32] = 0.0f;
    block_sync();
    const float x = given[at];
    out[at] = lane_get(x, 7 * at - 11);
    out[n + at] = lane_get_uniform(x, block_x() + 13);
    out[2 * n + at] = wave_scan_sum(x);
    out[3 * n + at] = wave_scan_sum_exclusive(x);
    out[4 * n + at] = (float)(wave_ballot(x > 0.0f) & 0xffff);
    out[5 * n + at] = wave_max(x) + (wave_any(x > 2.0f) ? 1.0f : 0.0f);
    atomic_add(count + lane() % 5, 3);
    atomic_add(shared + lane() % 7, 2.0f);
    block_sync();
    out[6 * n + at] = shared[lane() % 7] + (float)count[lane() % 5];
    atomic_add(total, (int)x);
    store_vec(wide + 4 * at, load_vec<4>(given4 + 4 * at));
    half[at] = f32_to_f16(x);
    """
    arrays = (
        Tensor("given", "f32", ("n",)),
        Tensor("given4", "f32", (4, "n"), align=16),
        Tensor("out", "f32", (7, "n"), writes=True),
        Tensor("wide", "f32", (4, "n"), writes=True, align=16),
        Tensor("half", "f16", ("n",), writes=True),
        Tensor("total", "i32", (1,), writes=True),
    )
    variant = kernel(body, *arrays, lds=(Lds("count", "int", 32), Lds("shared", "float", 64)))
    rng = np.random.default_rng(5)
    given = {
        "given": rng.standard_normal(96).astype(np.float32) * 3,
        "given4": rng.standard_normal((4, 96)).astype(np.float32),
        "out": np.zeros((7, 96), np.float32),
        "wide": np.zeros((4, 96), np.float32),
        "half": np.zeros(96, np.float16),
        "total": np.zeros(1, np.int32),
    }
    want = {name: x.copy() for name, x in given.items()}
    hk.launch(variant, "host", **want, n=96)
    got = launch(variant, on(arch), **given, n=96)
    for name, x in want.items():
        assert np.array_equal(got[name], x), name


@pytest.mark.parametrize("arch", ARCHS)
def test_matrix_maps(arch: str, host: object) -> None:
    """The probe of one-hot fragments: the maps that the templates claim are those of AMD's calculator."""
    assert matrix_probe.probe(on(arch)) == []


@pytest.mark.parametrize("arch", ARCHS)
def test_subnormal_operands_are_kept_or_flushed(arch: str, host: object) -> None:
    variant = families()["attention_verify_mma_q8"].variant(head_dim=128, group=1, rows=4, terms=1)
    case = next(iter(oracle_of(variant).grid(variant, quick=True)))
    small = dataclasses.replace(case, values="foreign", ctx=67, rows=4, seed=3)
    errors = [check(variant, small, hk.device(name)).error for name in (f"isa:{arch}", f"isa:{arch}+flush")]
    assert errors[0] != errors[1]  # scales of 6e-8 give subnormal products


# ---- parity ---------------------------------------------------------------------------------------------------------

SHAPES = (
    ("kv_cache_write_q8_0_batched", {"pair": True}),
    ("attention_flash_q8_0_tile_batched", {"head_dim": 128, "mask": "causal"}),
    ("attention_flash_q8_0_tile_batched", {"head_dim": 128, "mask": "tree"}),
    ("attention_flash_q8_0_rows", {"head_dim": 128, "rows": 8}),
    ("attention_flash_reduce_batched", {"head_dim": 128, "bound": "splits"}),
    ("attention_verify_gqa_q8", {"head_dim": 128, "group": 8, "rows": 8}),
    ("attention_verify_mma_q8", {"head_dim": 128, "group": 4, "rows": 8, "terms": 1}),
    ("attention_dflash_f32", {"head_dim": 128, "sliding": True}),
    ("attention_dflash_wmma_f32", {"head_dim": 64, "kv": "f16", "sliding": False}),
    ("attention_dflash_wmma_m32_f32", {"head_dim": 64, "kv": "f32", "sliding": True}),
    ("attention_dflash_wmma_n64_f32", {"head_dim": 128, "kv": "f16", "sliding": True}),
    ("attention_q8_0_flash_prefill_wmma", {"head_dim": 128}),
)
"""Every family, where one has two bodies both of them."""


def test_every_family_is_there() -> None:
    assert {name for name, _ in SHAPES} == set(families())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "params"), SHAPES)
def test_parity(name: str, params: dict[str, object], arch: str, host: object) -> None:
    """A few cases around a tile's edge, of every content."""
    variant = families()[name].variant(**params)
    cases = [case for case in oracle_of(variant).grid(variant, quick=True) if getattr(case, "ctx", 1) <= 255]
    for case in cases[:: max(1, len(cases) // 4)]:
        result = check(variant, case, on(arch))
        assert result.ok, result.describe()


@pytest.mark.long
@pytest.mark.parametrize("arch", [f"{name}{mode}" for mode in ("", "+flush") for name in ARCHS])
def test_parity_of_every_variant(arch: str, host: object) -> None:
    device, wrong = hk.device(f"isa:{arch}"), []
    for variant in (v for family in families().values() for v in family.variants() if v.fits(device.arch.name)):
        cases = list(oracle_of(variant).grid(variant, quick=True))
        results = [check(variant, case, device) for case in cases[::5]]
        wrong += [result.describe() for result in results if not result.ok]
    assert wrong == []


def test_the_order_of_waves_changes_nothing(host: object) -> None:
    variant = families()["attention_verify_gqa_q8"].variant(head_dim=128, group=8, rows=8)
    case = next(iter(oracle_of(variant).grid(variant, quick=True)))
    assert len({check(variant, case, IsaDevice("gfx1201", seed=seed)).error for seed in range(4)}) == 1


# ---- what is found --------------------------------------------------------------------------------------------------

OUT = Tensor("out", "f32", ("n",), writes=True)
IN = Tensor("x", "f32", ("n",))
SHARED = Lds("shared", "float", 64)
FOUND: dict[str, tuple[str, int, type[DeviceError], str]] = {
    "beyond an array": (
        "out[at + 1] = x[at];",
        32,
        MemoryFault,
        r"thread 31: accesses 4 bytes at address 0x\w+, outside .*out\[32\] of out",
    ),
    "before an array": (
        "out[at] = x[at - 1];",
        32,
        MemoryFault,
        r"thread 0: accesses 4 bytes .*x\[-1\] of x \(f32 \[32\]\)",
    ),
    "a write to an input": (
        "const_cast<float*>(x)[at] = out[at];",
        32,
        MemoryFault,
        r"writes 4 bytes at .*only reads: x\[0\] of x",
    ),
    "beyond LDS": (
        "shared[at] = 0.0f; block_sync(); out[at] = shared[64 * (n - 31)];",
        32,
        MemoryFault,
        "accesses 4 bytes at byte 256 of its 256 bytes of LDS",
    ),
    "LDS that nobody wrote": (
        "shared[at] = 0.0f; block_sync(); out[at] = shared[at + 16];",
        32,
        UndefinedBehaviour,
        "thread 16: reads byte 128 of LDS, which nobody has written",
    ),
    "a read with no barrier before": (
        "shared[at] = x[at]; out[at] = shared[at ^ 32];",
        64,
        UndefinedBehaviour,
        r"(reads byte \d+ of LDS, which wave [01] writes with no barrier|reads byte \d+ of LDS, which nobody)",
    ),
    "a write with no barrier before": (
        "shared[at] = x[at]; block_sync(); out[at] = shared[at ^ 32]; shared[at] = 1.0f;",
        64,
        UndefinedBehaviour,
        r"writes byte \d+ of LDS, which wave [01] accesses with no barrier",
    ),
    "a barrier that one wave does not reach": (
        "shared[at] = x[at]; if (wave() == 0) block_sync(); out[at] = shared[at];",
        64,
        DeadlockError,
        "wave 0: waits at a barrier that wave 1 does not reach",
    ),
    "a loop without an end": (
        "while (x[at] > 0.0f) atomic_add(out + at, x[at]);",
        32,
        DeadlockError,
        "has run 0 million instructions without an end",
    ),
}
"""What is planted, the threads of a block, the error, and what it says."""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("what", FOUND)
def test_what_is_planted_is_found(what: str, arch: str, host: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_MOST", 20_000)
    body, block, error, said = FOUND[what]
    variant = kernel(body, IN, OUT, block=block, lds=(SHARED,))
    with pytest.raises(error, match=said) as found:
        launch(variant, IsaDevice(arch), x=np.ones(block, np.float32), out=np.zeros(block, np.float32), n=block)
    assert f"tried on {arch}, block (0, 0, 0)" in str(found.value)
    assert re.search(r"at (body of tried|dialect_amd\.h|vocabulary_amd\.h):\d+: '.*", str(found.value))


def first(pattern: str) -> Callable[[Lines], int]:
    return lambda lines: instructions(lines, pattern)[0]


def drop(pattern: str) -> Callable[[Lines], Lines]:
    """Without the instructions of a pattern."""
    return lambda lines: [line for i, line in enumerate(lines) if i not in instructions(lines, pattern)]


def before(pattern: str, text: str) -> Callable[[Lines], Lines]:
    """With a line put in front of the first instruction of a pattern."""

    def edit(lines: Lines) -> Lines:
        at = instructions(lines, pattern)[0]
        return [*lines[:at], f"\t{text}", *lines[at:]]

    return edit


MATRIX = """
FragA a = {}; FragB b = {}; AccT c = {};
for (int i = 0; i < fragment::A_WORDS; ++i) { a.word[i] = b.word[i] = f32_to_bits(x[i]); }
mma(c, a, b);
out[at] = c.x[0];
"""
EDITED: dict[str, tuple[str, Callable[[Lines], Lines], str]] = {
    "a load that is not waited for": (
        "out[at] = x[at] + 1.0f;",
        drop("s_waitcnt vmcnt|s_wait_loadcnt"),
        r"uses v\d+ before it waits for its loads",
    ),
    "LDS that is not waited for": (
        "shared[at] = x[at]; block_sync(); out[at] = shared[at ^ 1] + 1.0f;",
        drop("s_waitcnt lgkmcnt|s_wait_dscnt"),
        r"before it has waited for LDS|uses v\d+ before it waits for LDS",
    ),
    "constants that are not waited for": (
        "out[at] = x[at];",
        drop("s_waitcnt lgkmcnt|s_wait_kmcnt"),
        r"uses s\d+ before it waits for its constants",
    ),
    "a register that nobody wrote": (
        "out[at] = x[at];",
        before("global_store", "v_add_f32_e32 v1, v1, v30"),
        r"depends on v1, in which lane 0 has what nobody",
    ),
    "an address that nobody wrote": (
        "out[at] = x[at];",
        before("global_load", "v_mov_b32_e32 v0, v29"),
        r"depends on v\d+, in which lane 0",
    ),
    "a branch on what nobody wrote": (
        "if (n > 40) out[at] = x[at]; out[at] = 1.0f;",
        before("s_cbranch", "s_cmp_eq_u32 s77, 1"),
        r"depends on vcc_lo, in which",
    ),
    "a lane that is off": (
        "out[at] = wave_max(x[at]);",
        before("v_max_f32_dpp|v_max_num_f32_dpp|v_mov_b32_dpp|v_dual_max|v_max", "s_mov_b32 exec_lo, 0xfffffffe"),
        r"takes the value of a lane that is switched off",
    ),
}


@pytest.fixture
def mended() -> Iterator[list[tuple[Variant, str]]]:
    """Kernels whose listing is the compiler's again afterwards."""
    changed: list[tuple[Variant, str]] = []
    yield changed
    for variant, arch in changed:
        forget(variant, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("what", EDITED)
def test_what_is_edited_is_found(what: str, arch: str, mended: list[tuple[Variant, str]], host: object) -> None:
    """What no source can have: the compiler is right about its waits."""
    body, edit, said = EDITED[what]
    variant = kernel(body, IN, OUT, lds=(SHARED,))
    given = {"x": np.ones(32, np.float32), "out": np.zeros(32, np.float32)}
    launch(variant, IsaDevice(arch), **given, n=32)
    mended.append((variant, arch))
    with pytest.raises(UndefinedBehaviour, match=said):
        launch(variant, edited(variant, arch, edit), **given, n=32)


@pytest.mark.parametrize(
    ("arch", "edit", "said"),
    [
        (
            "gfx1100",
            before("v_wmma", "v_mov_b32_dpp v8, v8 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"),
            "unequal halves",
        ),
        ("gfx1100", before("v_wmma", "s_mov_b32 exec_lo, 0xffff"), "with lanes 0x0000ffff alone"),
        ("gfx1201", before("v_wmma", "s_mov_b32 exec_lo, 0xffff"), "with lanes 0x0000ffff alone"),
    ],
)
def test_matrix_operands(
    arch: str, edit: Callable[[Lines], Lines], said: str, mended: list[tuple[Variant, str]]
) -> None:
    body = MATRIX.replace("x[i]", "x[i] + (float)lane()") if "alone" not in said else MATRIX
    variant = kernel(body, IN, OUT, matrix=True)
    given = {"x": np.ones(32, np.float32), "out": np.zeros(32, np.float32)}
    if "alone" in said:
        launch(variant, IsaDevice(arch), **given, n=32)
        mended.append((variant, arch))
    device = edited(variant, arch, edit) if "alone" in said else IsaDevice(arch)
    with pytest.raises(UndefinedBehaviour, match=said):
        launch(variant, device, **given, n=32)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_listing_of_another_build_is_refused(host: object) -> None:
    one, other = (built(kernel(f"out[at] = x[at] + {c}.0f;", IN, OUT), "gfx1201") for c in (1, 3))
    wrong = dataclasses.replace(one, listing=other.listing, key="wrong")
    with pytest.raises(DeviceError, match="tried for gfx1201: its assembly text does not assemble to its code"):
        IsaDevice("gfx1201").load(wrong)
    with pytest.raises(
        DeviceError, match=r"has no assembly text, .* hiprtc gives none.* Build it with the toolchain clang"
    ):
        IsaDevice("gfx1201").load(dataclasses.replace(one, listing="", key="none"))
    assert one.assembly.count("\n") > 20


def test_an_unknown_instruction_is_named_with_its_line(host: object) -> None:
    variant = kernel('float y = x[at];\nasm volatile("v_sad_u8 %0, %0, %0, %0" : "+v"(y));\nout[at] = y;', IN, OUT)
    said = r"tried for gfx1201: 'v_sad_u8' is no instruction of the interpreter's table; it is of body of tried:4: 'asm"
    with pytest.raises(decode.UnknownInstruction, match=said):
        launch(variant, IsaDevice("gfx1201"), x=np.ones(32, np.float32), out=np.zeros(32, np.float32), n=32)


def test_scratch_is_refused(host: object) -> None:
    variant = kernel(
        "float few[40]; for (int i = 0; i < 40; ++i) few[i] = x[i % n];\nout[at] = few[(int)x[at]];", IN, OUT
    )
    with pytest.raises(
        DeviceError, match=r"bytes of scratch a lane; the interpreter has none of that|is no instruction"
    ):
        launch(variant, IsaDevice("gfx1100"), x=np.ones(32, np.float32), out=np.zeros(32, np.float32), n=32)


def test_program_places(host: object) -> None:
    variant = kernel("out[at] = x[at];", IN, OUT)
    artifact = built(variant, "gfx1100")
    took = artifact.resources
    made = program.load(
        artifact.code, artifact.assembly, "tried", lookup("gfx1100"), artifact.source, took.vgprs or 0, 32
    )
    store = next(i for i, op in enumerate(made.ops) if op.row.name == "global_store_b32")
    assert str(made.line(store)) == "body of tried:3"
    assert made.instruction(store).text.startswith("global_store_b32")
