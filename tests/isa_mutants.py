"""One-line faults in what only AMD runs, and listings without one of their waits or barriers.

`python isa_mutants.py` runs all of them on the interpreter and prints the tables of docs/amd-machine-code.md.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mutants as host_mutants
import verify_lab
from isa_lab import ARCHS, built

from hipfire_kernels import families
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import matrix_probe
from hipfire_kernels.checking.oracle import check, oracle_of
from hipfire_kernels.errors import CompileError, DeviceError, HipfireError
from hipfire_kernels.interpreting import native, table
from hipfire_kernels.interpreting.decode import UnknownInstruction
from hipfire_kernels.interpreting.program import Program
from hipfire_kernels.kernels.arguments import SPLIT as SPLIT_ORACLE
from hipfire_kernels.running import binding
from hipfire_kernels.running.devices import isa
from hipfire_kernels.running.devices.isa import IsaDevice

DIALECT, MATRIX, MAPS, BODY = "dialect_amd.h", "matrix_amd.h", "matrix_maps.h", host_mutants.MMA_BODY
KV: tuple[str, dict[str, Any]] = (host_mutants.KV_WRITE, {"pair": True})
TILE: tuple[str, dict[str, Any]] = (host_mutants.TILE_BATCHED, {"head_dim": 128, "mask": "causal"})
ROWS: tuple[str, dict[str, Any]] = (host_mutants.ROWS, {"rows": 8, "head_dim": 128})
SPLIT: tuple[str, dict[str, Any]] = (host_mutants.GQA, {"head_dim": 128, "group": 8, "rows": 8})
MMA: tuple[str, dict[str, Any]] = (host_mutants.MMA, {"head_dim": 128, "group": 4, "rows": 8, "terms": 1})
M16: tuple[str, dict[str, Any]] = (host_mutants.M16, {"head_dim": 64, "kv": "f16", "sliding": False})
N64: tuple[str, dict[str, Any]] = (host_mutants.N64, {"head_dim": 128, "kv": "f16", "sliding": True})
PREFILL: tuple[str, dict[str, Any]] = (host_mutants.PREFILL, {"head_dim": 128})
PROBE: tuple[str, dict[str, Any]] = ("matrix_probe", {})
"""The kernel that asks a card for its lane maps."""

GFX11, GFX12 = ("gfx1100",), ("gfx1201",)


@dataclass(frozen=True)
class Mutant:
    """One fault: in `template`, every `old` becomes `new`; looked for in one kernel, on some archs."""

    name: str
    kernel: tuple[str, dict[str, Any]]
    template: str
    old: str
    new: str
    archs: tuple[str, ...] = ARCHS

    @property
    def variant(self) -> Variant:
        """The kernel it is looked for in."""
        return (
            matrix_probe.PROBE.variant()
            if self.kernel == PROBE
            else families()[self.kernel[0]].variant(**self.kernel[1])
        )


MUTANTS = [
    # dialect_amd.h
    Mutant("lanes of half a wave", ROWS, DIALECT, "thread() & 31", "thread() & 15"),
    Mutant("waves of 64", MMA, DIALECT, "thread() >> 5", "thread() >> 6"),
    Mutant("block_x is block_y", TILE, DIALECT, "workgroup_id_x()", "workgroup_id_y()"),
    Mutant("block_y is block_x", TILE, DIALECT, "workgroup_id_y()", "workgroup_id_x()"),
    Mutant("block_z is block_y", TILE, DIALECT, "workgroup_id_z()", "workgroup_id_y()"),
    Mutant("no barrier", MMA, DIALECT, "    __builtin_amdgcn_s_barrier();\n", ""),
    Mutant("no release before a barrier", MMA, DIALECT, '    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");\n', ""),
    Mutant("xor 16 with two lanes exchanged", MMA, DIALECT, "0x76543210", "0x67543210"),
    Mutant("xor 16 in the upper eight lanes", ROWS, DIALECT, "0xfedcba98", "0x76543210"),
    Mutant("xor 16 within a row", ROWS, DIALECT, "permlanex16(", "permlane16("),
    Mutant("xor of the neighbouring mask", ROWS, DIALECT, "0x160 | MASK", "0x160 | (MASK ^ 1)"),
    Mutant("row_ror for row_xmask", ROWS, DIALECT, "0x160 | MASK", "0x120 | MASK"),
    Mutant("fma subtracts", ROWS, DIALECT, "__builtin_fmaf(a, b, c)", "__builtin_fmaf(a, b, -c)"),
    Mutant("max is min", ROWS, DIALECT, "__builtin_fmaxf(a, b)", "__builtin_fminf(a, b)"),
    Mutant("abs does nothing", KV, DIALECT, "__builtin_fabsf(a)", "a"),
    Mutant("rint truncates", KV, DIALECT, "__builtin_rintf(a)", "__builtin_truncf(a)"),
    Mutant("exp2 of a thousandth more", ROWS, DIALECT, "__builtin_amdgcn_exp2f(x)", "__builtin_amdgcn_exp2f(x * 1.001f)"),
    Mutant("f16 read as a whole number", ROWS, DIALECT, "(float)__builtin_bit_cast(_Float16, bits)", "(float)bits"),
    Mutant("f16 written too large", KV, DIALECT, "(_Float16)x);", "(_Float16)(x * 1.002f));"),
    Mutant("a scale read one byte late", ROWS, DIALECT, "__builtin_memcpy(&w, p, 2)", "__builtin_memcpy(&w, p + 1, 2)"),
    Mutant("a scale written two bytes late", KV, DIALECT, "__builtin_memcpy(p, &w, 2)", "__builtin_memcpy(p + 2, &w, 2)"),
    Mutant("codes read one byte late", ROWS, DIALECT, "__builtin_memcpy(codes.word, p, COUNT)", "__builtin_memcpy(codes.word, p + 1, COUNT)"),
    Mutant("three of four codes are signed", ROWS, DIALECT, "^ 0x80808080u", "^ 0x00808080u"),
    Mutant("codes in turn", ROWS, DIALECT, ">> (8 * (i % 4))", ">> (8 * (i % 2))"),
    Mutant("codes one too large", ROWS, DIALECT, "- 128.0f", "- 127.0f"),
    # matrix_amd.h
    Mutant("a pair packed the wrong way round", MMA, MATRIX, "(half2){(_Float16)x, (_Float16)y}", "(half2){(_Float16)y, (_Float16)x}"),
    Mutant("the high half of a pair is its low one", M16, MATRIX, "(unsigned short)(word >> 16)", "(unsigned short)word"),
    Mutant("low halves of one word", N64, MATRIX, "0x05040100", "0x01000100"),
    Mutant("high halves exchanged", N64, MATRIX, "0x07060302", "0x03020706"),
    Mutant("one of two codes off by one", MMA, MATRIX, "(_Float16)1152, (_Float16)1152", "(_Float16)1152, (_Float16)1151"),
    Mutant("the first two codes exchanged", MMA, MATRIX, "0x04010400", "0x04000401"),
    Mutant("the second two codes exchanged", MMA, MATRIX, "0x04030402", "0x04020403"),
    Mutant("codes become f16 with a sign of their own", MMA, MATRIX, "codes ^ 0x80808080u", "codes ^ 0x80008080u"),
    Mutant("scales are added", MMA, MATRIX, "__builtin_bit_cast(half2, x) * __builtin_bit_cast(half2, y)", "__builtin_bit_cast(half2, x) + __builtin_bit_cast(half2, y)"),
    Mutant("operands exchanged in an Acc", M16, MATRIX, "wmma(c.x, b.word, a.word)", "wmma(c.x, a.word, b.word)"),
    Mutant("operands exchanged in an AccT", MMA, MATRIX, "wmma(c.x, a.word, b.word)", "wmma(c.x, b.word, a.word)"),
    Mutant("products are not added up", MMA, MATRIX, "c[i] = x[i];", "c[i] = 0.0f;"),
    Mutant("upper results of a product are the lower", MMA, MATRIX, "x[i] = c[i];", "x[i] = c[i & 3];"),
    Mutant("both chunks of an operand are the first", MMA, MATRIX, "(k0 >> 3) + c, within", "k0 >> 3, within", GFX11),
    Mutant("both halves of a wave have the first chunk", MMA, MATRIX, "== 4 ? lane() >> 4 : 0;\n        const Chunk", "== 4 ? 0 : 0;\n        const Chunk", GFX12),
    Mutant("words of an operand in reverse", MMA, MATRIX, "word[4 * c + i] = chunk[i];", "word[4 * c + i] = chunk[3 - i];"),
    Mutant("rows of an operand twice", MMA, MATRIX, "row0, lane() & 15, (k0", "row0, lane() & 7, (k0"),
    Mutant("even and odd columns exchanged", N64, MATRIX, "return 2 * c + f;", "return 2 * c + 1 - f;"),
    Mutant("a lane reads its neighbour's column", N64, MATRIX, "+ (lane() & 3)];", "+ (lane() & 1)];"),
    Mutant("the upper half of a wave four rows too low", N64, MATRIX, "* 8 * CHUNKS", "* 4 * CHUNKS", GFX12),
    Mutant("the second of two k is the first", N64, MATRIX, "k0 + 2 * w + 1, col0", "k0 + 2 * w, col0"),
    Mutant("the second fragment is the first", N64, MATRIX, "b[1].word[w] = high_halves", "b[1].word[w] = low_halves"),
    Mutant("the first fragment stored twice", N64, MATRIX, "= second.x[i];", "= first.x[i];"),
    Mutant("what is not valid is copied", PROBE, MATRIX, "valid ? chunk : zero", "chunk"),
    # matrix_maps.h
    Mutant("gfx11: columns of an Acc in pairs exchanged", M16, MAPS, "acc_col(int i, int l) { return 2 * i + (l >> 4); }", "acc_col(int i, int l) { return 2 * i + 1 - (l >> 4); }", GFX11),
    Mutant("gfx11: rows of an AccT in pairs exchanged", MMA, MAPS, "acct_row(int i, int l) { return 2 * i + (l >> 4); }", "acct_row(int i, int l) { return 2 * i + 1 - (l >> 4); }", GFX11),
    Mutant("gfx11: rows of an AccT by halves", MMA, MAPS, "acct_row(int i, int l) { return 2 * i + (l >> 4); }", "acct_row(int i, int l) { return i + 8 * (l >> 4); }", GFX11),
    Mutant("gfx11: k of A in pairs exchanged", MMA, MAPS, "a_k(int i, int) { return i; }", "a_k(int i, int) { return i ^ 2; }", GFX11),
    Mutant("gfx12: columns of an Acc as gfx11 has them", M16, MAPS, "acc_col(int i, int l) { return 8 * (l >> 4) + i; }", "acc_col(int i, int l) { return 2 * i + (l >> 4); }", GFX12),
    Mutant("gfx12: rows of an AccT as gfx11 has them", MMA, MAPS, "acct_row(int i, int l) { return 8 * (l >> 4) + i; }", "acct_row(int i, int l) { return 2 * i + (l >> 4); }", GFX12),
    Mutant("gfx12: k of A for all lanes alike", MMA, MAPS, "a_k(int i, int l) { return 8 * (l >> 4) + i; }", "a_k(int i, int) { return i; }", GFX12),
    Mutant("gfx12: halves of k exchanged in A alone", MMA, MAPS, "a_k(int i, int l) { return 8 * (l >> 4) + i; }", "a_k(int i, int l) { return 8 * (1 - (l >> 4)) + i; }", GFX12),
    Mutant("rows of A twice", MMA, MAPS, "a_row(int, int l) { return l & 15; }", "a_row(int, int l) { return l & 14; }"),
    Mutant("columns of an AccT twice", MMA, MAPS, "acct_col(int, int l) { return l & 15; }", "acct_col(int, int l) { return l & 7; }"),
    Mutant("rows of an Acc twice", M16, MAPS, "acc_row(int, int l) { return l & 15; }", "acc_row(int, int l) { return l & 7; }"),
    Mutant("sums of columns over half the lanes", MMA, MAPS, "COL_LANES = 16", "COL_LANES = 0"),
    Mutant("sums of rows over half the lanes", M16, MAPS, "ROW_LANES = 16", "ROW_LANES = 0"),
    # verify_mma_wave.h.j2: those of the host's table that concern the order of waves and what a lane holds
    *(
        Mutant(one.name, (host_mutants.MMA, one.params), BODY, one.old, one.new)
        for one in host_mutants.MUTANTS
        if one.template == BODY and one.params == host_mutants.COLUMNS40
    ),
]  # fmt: skip


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """With the fault in the templates of this process."""
    fault = host_mutants.Mutant(mutant.name, mutant.kernel[0], {}, mutant.template, mutant.old, mutant.new)
    before, environment = templates._environment, host_mutants._mutated_environment(fault)
    templates._environment = lambda folder: environment  # type: ignore[assignment]
    binding.kernel.cache_clear()
    try:
        yield
    finally:
        templates._environment = before
        binding.kernel.cache_clear()


def cases(variant: Variant) -> list[Any]:
    """A few of the grid: around a tile's edge, and each named content once."""
    every = [one for one in oracle_of(variant).grid(variant, quick=True) if getattr(one, "ctx", 1) <= 400]
    plain = [one for one in every if getattr(one, "values", "") == "normal"]
    return [*plain[:: max(1, len(plain) // 6)], *(one for one in every if one not in plain)]


def found(variant: Variant, on: IsaDevice) -> str:
    """What is found of a kernel, in a few words; empty where nothing is. A fault that no compiler takes, or that makes
    an instruction the table lacks, is none that a check has seen: it raises."""
    try:
        return _wrong(variant, on)
    except (CompileError, UnknownInstruction):
        raise
    except DeviceError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except HipfireError as error:
        return str(error)


def _wrong(variant: Variant, on: IsaDevice) -> str:
    """The first result that is not right."""
    if variant.family.name == PROBE[0]:
        return "".join(f"wrong: {one}" for one in matrix_probe.probe(on)[:1])
    for case in cases(variant):
        result = check(variant, case, on)
        if not result.ok:
            return f"wrong: {result.fault or f'error {result.error:.2g}, limit {result.limit:.2g}'}"
    further = verify_lab.CHECKS if variant.family.oracle == SPLIT_ORACLE else ()
    return next((f"wrong: {said}" for one in further if (said := one(variant, on))), "")


def caught(mutant: Mutant, arch: str) -> str:
    """What is found of a mutant; empty where it survives. What is right with subnormal f16 may be wrong without."""
    with planted(mutant):
        return found(mutant.variant, IsaDevice(arch)) or found(mutant.variant, IsaDevice(arch, flushed=True))


# ---- waits and barriers ---------------------------------------------------------------------------------------------

WAITS = ("s_waitcnt", "s_waitcnt_vscnt", "s_wait_", "s_barrier")
NOT_MODELLED = ("s_waitcnt_depctr", "s_wait_alu")
"""They fill hazards between instructions, and wait for no memory."""


def waits(program: Program) -> list[int]:
    """The instructions that wait for memory or for other waves."""
    names = [op.row.name12 if program.gfx12 else op.row.name for op in program.ops]
    return [i for i, name in enumerate(names) if name.startswith(WAITS) and name not in NOT_MODELLED]


def loaded(variant: Variant, arch: str) -> Program:
    """The program that the devices of this process run."""
    return isa.loaded(built(variant, arch))


@contextlib.contextmanager
def without(program: Program, op: int) -> Iterator[None]:
    """With an instruction that does nothing in the place of one."""
    ops = program._kept[0]
    before, ops[op].code = ops[op].code, table.by_name(program.gfx12)["s_nop"].code
    try:
        yield
    finally:
        ops[op].code = before


def executed(variant: Variant, arch: str) -> set[int]:
    """The instructions that the cases come to."""
    device = IsaDevice(arch)
    assert found(variant, device) == ""
    (trace,) = (one for one in device.driver.traces.values() if one.program.entry == variant.entry)
    return {i for i, runs in enumerate(trace.executed.runs) if runs}


@dataclass(frozen=True)
class Removed:
    """A wait or barrier that was taken out, and what was found then."""

    program: Program
    op: int
    said: str
    runs: bool

    @property
    def reported(self) -> bool:
        """Whether a check named it, rather than a wrong result or nothing."""
        return bool(self.said) and not self.said.startswith("wrong")


def removed(variant: Variant, arch: str, every: int = 1) -> list[Removed]:
    """Each wait and barrier of a kernel taken out, or each n-th of them."""
    program, ran = loaded(variant, arch), executed(variant, arch)
    results = []
    for op in waits(program)[::every]:
        with without(program, op):
            results.append(Removed(program, op, found(variant, IsaDevice(arch)), op in ran))
    return results


def main() -> int:
    """Print both tables; 1 if something is missed."""
    native.machine()
    missed = 0
    print("| fault | in | looked for in | gfx1100 | gfx1201 |\n|---|---|---|---|---|")
    for mutant in MUTANTS:
        said = {arch: caught(mutant, arch) for arch in mutant.archs}
        missed += sum(not one for one in said.values())
        shown = [_short(said[arch]) if arch in said else "" for arch in ARCHS]
        print(f"| {mutant.name} | {mutant.template} | {mutant.variant.entry} | {' | '.join(shown)} |", flush=True)
    for arch in ARCHS:
        results = removed(families()[MMA[0]].variant(**MMA[1]), arch)
        reported = sum(one.reported for one in results)
        print(f"\n{arch}: {len(results)} waits and barriers, {reported} removals reported")
        for one in results:
            if not one.reported:
                at = one.program.line(one.op)
                why = _short(one.said) or ("silent" if one.runs else "not executed")
                print(f"  {one.op} {one.program.instruction(one.op).text} at {at}: {why}", flush=True)
    print(f"\n{len(MUTANTS)} faults, {missed} missed")
    return int(missed > 0)


def _short(said: str) -> str:
    """The class of what was found."""
    kinds = {
        "nobody has written": "unwritten",
        "before it waits": "used early",
        "with no barrier": "race",
        "outside of every array": "outside",
        "bytes of LDS": "outside LDS",
        "a barrier": "barrier",
        "switched off": "lane off",
        "unequal halves": "halves",
        "without an end": "endless",
    }
    if not said or said.startswith("wrong"):
        return said.partition(":")[0] or "**missed**"
    return next((short for words, short in kinds.items() if words in said), said[:60])


if __name__ == "__main__":
    sys.exit(main())
