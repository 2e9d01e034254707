"""What a kernel's instructions are: read from the compiler's assembly, by class and loop, with source lines.

Counts are of instructions as they stand in the code. A loop that the compiler unrolled has the instructions of all the
turns it merged; how often a loop runs is not known here.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.authoring.places import NOWHERE, Place
from hipfire_kernels.building.builder import Buildable
from hipfire_kernels.building.toolchains import Toolchain
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import ToolchainError
from hipfire_kernels.inspecting.flow import cycles

KINDS = MappingProxyType(
    {
        "matrix": "matrix multiply-adds: v_wmma, HMMA, HGMMA",
        "dot": "dot products of packed numbers: v_dot, IDP",
        "load": "reads of global memory, asynchronous copies too",
        "store": "writes and atomics to global memory",
        "flat": "accesses whose address space the compiler could not tell",
        "lds": "reads, writes and atomics of LDS",
        "scratch": "private memory of a lane: spills, arrays indexed at run time",
        "lane": "exchanges between lanes: permutes, shuffles, operands through DPP, values read by lane",
        "trans": "exp2, log2, reciprocal, roots: a quarter of the rate",
        "convert": "conversions between number formats",
        "vector": "all other vector arithmetic, moves and comparisons",
        "scalar": "scalar (uniform) arithmetic and reads of constants",
        "branch": "jumps, and what prepares for them",
        "barrier": "barriers of a block",
        "wait": "waits for memory, hints to the scheduler, no-ops",
    }
)
"""Every class of instruction, and what is in it."""

_AMD = (
    ("matrix", r"v_(wmma|swmmac|mfma)"),
    ("dot", r"v_dot"),
    ("lane", r"v_permlane|v_readlane|v_readfirstlane|v_writelane|ds_(bpermute|permute|swizzle)|v_\w+_dpp"),
    ("scratch", r"scratch_"),
    ("flat", r"flat_"),
    ("load", r"(global|buffer)_load"),
    ("store", r"(global|buffer)_(store|atomic)"),
    ("lds", r"ds_"),
    ("trans", r"v_(s_)?(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    ("convert", r"v_cvt_"),
    ("branch", r"s_c?branch|s_setpc|s_swappc|s_call|s_endpgm"),
    ("barrier", r"s_barrier|s_wakeup"),
    ("wait", r"s_wait|s_delay_alu|s_nop|s_sleep|s_clause|s_set_inst_prefetch|s_sendmsg|(buffer|global)_\w*(inv|wb)"),
    ("vector", r"v_"),
    ("scalar", r"s_"),
)
_NVIDIA = (
    ("matrix", r"(H|I|D|B|Q|O)G?MMA\b"),
    ("dot", r"IDP"),
    ("load", r"LDG(?!DEP)|UBLKCP|UTMALDG"),
    ("store", r"STG|RED\b|ATOMG|ATOM\b|UTMASTG|UTMAREDG"),
    ("scratch", r"LDL|STL"),
    ("lds", r"LDS|STS|ATOMS"),
    ("flat", r"LD\b|ST\b"),
    ("lane", r"SHFL|U?VOTE|MATCH|REDUX|R2UR|ELECT"),
    ("trans", r"MUFU"),
    ("convert", r"(F|I)2(F|I|FP|IP)\b|FRND"),
    ("branch", r"U?BRA\b|BRX|EXIT|RET|CALL|JMP|JMX|BSSY|BSYNC|BREAK|BMOV|WARPSYNC|KILL|BPT"),
    ("barrier", r"BAR|B2R|SYNCS"),
    ("wait", r"NOP|DEPBAR|LDGDEPBAR|ERRBAR|CCTL|MEMBAR|FENCE|WARPGROUP|NANOSLEEP|ACQBULK|UTMACMDFLUSH"),
    ("scalar", r"U[A-Z]|LDC|ULDC|S2R|S2UR|CS2R"),
    ("vector", r"[A-Z]"),
)
_CLASSES = {
    "amd": [(kind, re.compile(pattern)) for kind, pattern in _AMD],
    "nvidia": [(kind, re.compile(pattern)) for kind, pattern in _NVIDIA],
}
"""Per dialect, tried in order on the whole mnemonic; the first that fits names the class."""

_NO_RETURN = re.compile(r"s_branch|s_endpgm|s_setpc|(?:EXIT|BRA(?!\.DIV)|RET|BRX|JMP)\b(?!.* !?U?P\d,)")
"""Instructions that control never passes: a predicated one does not match."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        text: as the assembler writes it.
        kind: its class, of `KINDS`.
        at: the line of a template that it comes from; nowhere where the compiler does not say.
        body: the line in the kernel's body that it comes from: where `at` is in a function that the compiler inlined,
            the line that calls it.
        labels: names of the place.
    """

    text: str
    kind: str
    at: Place = NOWHERE
    body: Place = NOWHERE
    labels: tuple[str, ...] = ()


Counts = MappingProxyType[str, int]
"""Instructions by class, every class of `KINDS`; `all` is their sum."""


@dataclass(frozen=True)
class Loop:
    """One loop.

    Attributes:
        depth: 1 for an outermost loop.
        parent: index in `Listing.loops` of the loop around it, None for an outermost one.
        counts: instructions of one turn, each inner loop counted once.
        lines: first and last line in the kernel's body that its instructions come from, those that the compiler moved
            too, of the template that most of them are in; nowhere where it says nothing.
        instructions: indices into `Listing.instructions`.
    """

    depth: int
    parent: int | None
    counts: Counts
    lines: tuple[Place, Place]
    instructions: frozenset[int]


@dataclass(frozen=True)
class Listing:
    """The instructions of one kernel on one arch.

    Attributes:
        entry: the kernel's symbol.
        arch: exact arch name.
        source: the rendered source, with the text of the lines.
        instructions: in the order of the code.
        targets: index of an instruction to the label that it may jump to.
    """

    entry: str
    arch: str
    source: str
    instructions: tuple[Instruction, ...]
    targets: dict[int, str] = field(repr=False)

    @property
    def totals(self) -> Counts:
        """Instructions of the whole kernel, by class."""
        return count(self.instructions)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Its loops, in the order of the code, an outer one before those in it."""
        return _loops(self)


def listing(variant: Buildable, arch: str = "gfx1100", toolchain: str | Toolchain | None = None) -> Listing:
    """Compile a variant with line tables, which does not change its code, and read the assembly.

    Raises:
        InputError, RenderError, CompileError: as `builder.build`.
        ToolchainUnavailable: no compiler or no disassembler for `arch` here.
    """
    target = lookup(arch)
    source = variant.source(target.name)
    return parse(choose(target, toolchain).assembly(source, target), variant.entry, target.name, source)


def parse(assembly: str, entry: str, arch: str, source: str = "") -> Listing:
    """Read an assembly text: clang's `-S` for a gfx arch, nvdisasm's for an NVIDIA one.

    Raises:
        ToolchainError: it has no function of that name.
    """
    dialect = lookup(arch).dialect
    lines = _function(assembly, entry)
    found, targets = _read_sass(lines) if dialect == "nvidia" else _read_amd(lines)
    if not found:
        raise ToolchainError(f"the assembly for {arch} has no function {entry!r}")
    return Listing(entry, arch, source, tuple(found), targets)


def count(instructions: Iterable[Instruction]) -> Counts:
    """Instructions by class."""
    counts = dict.fromkeys([*KINDS, "all"], 0)
    for one in instructions:
        counts[one.kind] += 1
        counts["all"] += 1
    return MappingProxyType(counts)


# ---- reading --------------------------------------------------------------------------------------------------------


def _function(assembly: str, entry: str) -> list[str]:
    """The lines from a function's label to its end."""
    lines = assembly.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(rf"(?:\.text\.)?{re.escape(entry)}:", line)), None)
    if start is None:
        return []
    ends = (i for i, line in enumerate(lines) if i > start and re.match(r"\.Lfunc_end|//-----", line))
    return lines[start + 1 : next(ends, len(lines))]


def kind_of(mnemonic: str, dialect: str) -> str:
    """The class of an instruction, by its mnemonic. What no pattern knows is `vector`."""
    return next((kind for kind, pattern in _CLASSES[dialect] if pattern.match(mnemonic)), "vector")


def _read_amd(lines: Sequence[str]) -> tuple[list[Instruction], dict[int, str]]:
    found: list[Instruction] = []
    targets: dict[int, str] = {}
    labels: list[str] = []
    place = (NOWHERE, NOWHERE)
    for line in lines:
        code, _, comment = line.partition(";")
        code = code.strip()
        if code.startswith(".loc"):
            # `file:line:column @[ file:line:column @[ ... ] ]`, the inmost first.
            chain = [
                Place(file.strip(), int(number)) for file, number in re.findall(r"([^@\[\]]+?):(\d+):\d+", comment)
            ]
            place = (chain[0], chain[-1]) if chain else (NOWHERE, NOWHERE)
        elif code.endswith(":"):
            labels += [] if code.startswith((".Ltmp", ".Lfunc")) else [code[:-1]]  # of the line tables
        elif code and not code.startswith("."):
            if code.startswith(("s_branch", "s_cbranch")):
                targets[len(found)] = code.split()[1]
            found.append(Instruction(code, kind_of(code.split()[0], "amd"), *place, tuple(labels)))
            labels = []
    return found, targets


def _read_sass(lines: Sequence[str]) -> tuple[list[Instruction], dict[int, str]]:
    found: list[Instruction] = []
    targets: dict[int, str] = {}
    labels: list[str] = []
    notes: list[Place] = []
    place = (NOWHERE, NOWHERE)
    for line in lines:
        noted = re.match(r'\s*//## File "([^"]*)", line (\d+)', line)
        code = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if noted:
            notes.append(Place(noted[1].rpartition("/")[2], int(noted[2])))
        elif label := re.match(r"(\.L_x_\d+):", line):
            labels.append(label[1])
        elif code:
            # A chain of inlined calls is a note a level, the inmost first.
            place = (notes[0], notes[-1]) if notes else place
            text = code[1]
            mnemonic = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
            to = re.search(r"`\((\.L_x_\d+)\)", text)
            # A branch on divergence leads to what a wave of one mind never runs; a BSSY only notes where it ends.
            if to and re.match(r"BRA(?!\.DIV)|JMP|BRX", mnemonic):
                targets[len(found)] = to[1]
            found.append(Instruction(text, kind_of(mnemonic, "nvidia"), *place, tuple(labels)))
            labels, notes = [], []
    return found, targets


# ---- loops ----------------------------------------------------------------------------------------------------------


def _blocks(listed: Listing) -> tuple[list[range], list[list[int]]]:
    """Basic blocks as ranges of instructions, and the successors of each."""
    code = listed.instructions
    starts = {0} | {i for i, one in enumerate(code) if one.labels}
    starts |= {i + 1 for i, one in enumerate(code) if i in listed.targets or _NO_RETURN.match(one.text)}
    edges = [*sorted(starts - {len(code)}), len(code)]
    blocks = [range(a, b) for a, b in itertools.pairwise(edges)]
    at = {label: n for n, block in enumerate(blocks) for label in code[block[0]].labels}
    following: list[list[int]] = []
    for n, block in enumerate(blocks):
        last = block[-1]
        after = [at[listed.targets[last]]] if listed.targets.get(last) in at else []
        if n + 1 < len(blocks) and not _NO_RETURN.match(code[last].text):
            after.append(n + 1)
        following.append(after)
    return blocks, following


def _loops(listed: Listing) -> tuple[Loop, ...]:
    blocks, following = _blocks(listed)
    found = sorted(cycles(following), key=lambda cycle: (cycle.header, -len(cycle.blocks)))
    loops: list[Loop] = []
    for cycle in found:
        around = [i for i, other in enumerate(found[: len(loops)]) if cycle.blocks < other.blocks]
        parent = min(around, key=lambda i: len(found[i].blocks), default=None)
        inside = frozenset(i for block in cycle.blocks for i in blocks[block])
        code = [listed.instructions[i] for i in sorted(inside)]
        loops.append(
            Loop(
                depth=1 if parent is None else loops[parent].depth + 1,
                parent=parent,
                counts=count(code),
                lines=_span([one.body for one in code if one.body.line]),
                instructions=inside,
            )
        )
    return tuple(loops)


def _span(places: Sequence[Place]) -> tuple[Place, Place]:
    """The first and last of those in the file that most are in."""
    if not places:
        return (NOWHERE, NOWHERE)
    [(file, _)] = Counter(place.file for place in places).most_common(1)
    inside = [place for place in places if place.file == file]
    return (min(inside), max(inside))
