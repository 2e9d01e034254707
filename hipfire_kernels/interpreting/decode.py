"""An instruction's text, as the compiler's assembly has it, to what the machine takes."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from hipfire_kernels.errors import DeviceError
from hipfire_kernels.interpreting import table
from hipfire_kernels.interpreting.table import Row

NONE, VECTOR, SCALAR, CONSTANT = range(4)
WORD, LOW, HIGH, PAIR, MASK = range(5)
SWAP_LOW, SWAP_HIGH, NEGATE_LOW, NEGATE_HIGH, SHIFT, FROM_F16 = 1, 2, 4, 8, 16, 32
ABS32, NEGATE32, ABS16, NEGATE16 = 64, 128, 256, 512
PAIRED, CLAMP, TO_EXEC, SELECTS, RETURNS, APART = 1, 2, 4, 8, 16, 32
LOADS, SHARED_OPS, CONSTANTS, STORES = range(4)
"""As in `machine/layout.h`."""

NO_REG = 0xFFFF
COUNTERS = {
    "vmcnt": (LOADS,),
    "lgkmcnt": (SHARED_OPS,),  # and constants, which gfx11 counts together with LDS
    "s_waitcnt_vscnt": (STORES,),
    "s_wait_loadcnt": (LOADS,),
    "s_wait_dscnt": (SHARED_OPS,),
    "s_wait_kmcnt": (CONSTANTS,),
    "s_wait_storecnt": (STORES,),
    "s_wait_loadcnt_dscnt": (LOADS, SHARED_OPS),
    "s_wait_storecnt_dscnt": (STORES, SHARED_OPS),
}
_SPECIAL = {
    "vcc_lo": 106, "vcc": 106, "vcc_hi": 107, "null": 124, "m0": 125, "exec_lo": 126, "exec": 126, "exec_hi": 127,
}  # fmt: skip
_TTMP, _VCC = 108, 106
_APART = re.compile(r"v_(mov|not|and|or|xor|xnor|and_or|or3|xor3|bfi|cndmask)_b32$|v_mad_[ui]64_[ui]32|v_lshlrev_b64")
"""The low part of the result is a matter of the low parts of the sources."""


class UnknownInstruction(DeviceError):
    """The machine does not have an instruction, or not this form of it."""


class Source(NamedTuple):
    """One source; see `hk_source`."""

    kind: int = NONE
    part: int = WORD
    mods: int = 0
    reg: int = 0
    needs: int = WORD
    value: int = 0


class Op(NamedTuple):
    """One instruction; see `hk_op`. `lanes`: what a lane reads through DPP; nothing without it."""

    row: Row
    flags: int = 0
    result: int = NONE
    part: int = WORD
    reg: int = 0
    mask_reg: int = NO_REG
    lanes: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    offset: tuple[int, int] = (0, 0)
    wait: tuple[int, int, int, int] = (-1, -1, -1, -1)


@functools.lru_cache(maxsize=1 << 16)
def decode(text: str, gfx12: bool) -> tuple[Op, ...]:
    """What one line of assembly asks for: one instruction, or the two of a `v_dual_`.

    Raises:
        UnknownInstruction: the table has no such instruction, or it has a form that the machine does not know.
    """
    try:
        made = [_one(half.strip(), gfx12) for half in text.split("::")]
    except (ValueError, IndexError, KeyError) as error:
        raise UnknownInstruction(f"{text!r} has a form that is not known ({error})") from None
    if len(made) == 2:
        made[0] = made[0]._replace(flags=made[0].flags | PAIRED)
    return tuple(made)


def _one(text: str, gfx12: bool) -> Op:
    mnemonic, _, rest = text.partition(" ")
    name = re.sub(r"_(e32|e64|dpp|e64_dpp)$", "", mnemonic).replace("v_dual_", "v_")
    to_exec = name.startswith("v_cmpx_")
    row = table.by_name(gfx12).get(name.replace("v_cmpx_", "v_cmp_"))
    if row is None:
        raise UnknownInstruction(f"{mnemonic!r} is no instruction of the interpreter's table")
    operands = [part.strip() for part in re.split(r",\s*(?![^\[]*\])", rest)] if rest else []
    tail = ""
    if operands and " " in operands[-1]:
        operands[-1], tail = operands[-1].split(None, 1)
    if row.sources == "c":
        return Op(row, wait=_waits(name, rest))
    if row.kind == "MEMORY":
        return _memory(row, operands, tail)
    if row.kind == "SCALAR":
        return _scalar(row, operands)
    if to_exec:
        return _vector(row, ["null", *operands], tail)._replace(flags=TO_EXEC, mask_reg=NO_REG)
    return _vector(row, operands, tail)


# ---- operands -------------------------------------------------------------------------------------------------------


def _register(text: str) -> tuple[int, int] | None:
    """Which kind and number, of the first of several; None for what is no register."""
    found = re.fullmatch(r"([vs])(\d+)|([vs])\[(\d+):\d+\]|ttmp(\d+)|ttmp\[(\d+):\d+\]", text)
    if found:
        if ttmp := found[5] or found[6]:
            return SCALAR, _TTMP + int(ttmp)
        kind = VECTOR if (found[1] or found[3]) == "v" else SCALAR
        return kind, int(found[2] or found[4])
    return (SCALAR, _SPECIAL[text]) if text in _SPECIAL else None


def _bits(text: str, half: bool) -> int:
    """A constant. What is written with a point is a float, of 16 bits where the operand has 16."""
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        if text == "0.15915494":  # 1 / (2 pi)
            return 0x3118 if half else 0x3E22F983
        return int.from_bytes(struct.pack("<e" if half else "<f", float(text)), "little")
    return int(text, 0) & 0xFFFFFFFF


def _source(text: str, letter: str) -> Source:
    """A source with its sign, for an operand of that letter."""
    text, negated, absolute = _sign(text)
    high = text.endswith(".h")
    text = re.sub(r"\.[lh]$", "", text)
    half = letter in "hs"
    mods = (NEGATE16 if half else NEGATE32) * negated | (ABS16 if half else ABS32) * absolute | SHIFT * high
    needs = (HIGH if high else LOW) if half else WORD
    part = {"w": PAIR, "m": MASK}.get(letter, WORD)
    register = _register(text)
    if register is not None:
        return Source(register[0], part, mods, register[1], needs)
    return Source(CONSTANT, part, mods, 0, WORD, _bits(text, letter in "hsp"))


def _sign(text: str) -> tuple[str, bool, bool]:
    """Without the sign and the bars that only registers have; a constant has its own."""
    negated = absolute = False
    if re.match(r"-[vs|e]|-ttmp|neg\(", text):
        negated, text = True, text[4:-1] if text.startswith("neg(") else text[1:]
    if text.startswith(("|", "abs(")):
        absolute, text = True, text[1:-1] if text.startswith("|") else text[4:-1]
    return text, negated, absolute


def _flags(tail: str, name: str, default: int) -> int:
    """`op_sel:[0,1]` as bits."""
    found = re.search(rf"\b{name}:\[([01,]+)\]", tail)
    return sum(int(bit) << i for i, bit in enumerate(found[1].split(","))) if found else default


# ---- forms ----------------------------------------------------------------------------------------------------------


def _waits(name: str, rest: str) -> tuple[int, int, int, int]:
    most = [-1, -1, -1, -1]
    if name == "s_waitcnt":
        for counter, count in re.findall(r"(\w+)\((\d+)\)", rest):
            for one in COUNTERS[counter] if counter != "expcnt" else ():
                most[one] = int(count)
        if "(" not in rest:
            raise ValueError("a count without a counter")
    elif len(COUNTERS[name]) == 2:
        for one, shift in zip(COUNTERS[name], (8, 0), strict=True):
            most[one] = int(rest, 0) >> shift & 63
    else:
        most[COUNTERS[name][0]] = int(rest.rpartition(",")[2], 0)
    return most[0], most[1], most[2], most[3]


def _scalar(row: Row, operands: list[str]) -> Op:
    if row.sources in ("", "b"):
        return Op(row)
    made = Op(row)
    if row.result:
        kind, reg = _register(operands[0]) or (NONE, 0)
        if kind != SCALAR:
            raise ValueError(f"{operands[0]} is no scalar register")
        made = made._replace(result=SCALAR, reg=reg)
    given = iter(operands[1:] if row.result else operands)
    sources = []
    for letter in row.sources:
        if letter == "o":
            sources.append(Source(SCALAR, WORD, 0, made.reg))
        elif letter == "k":
            low = _bits(next(given), False) & 0xFFFF
            sources.append(Source(CONSTANT, value=(low ^ 0x8000) - 0x8000 & 0xFFFFFFFF))
        else:
            sources.append(_source(next(given), letter))
    return made._replace(sources=tuple(sources))


def _vector(row: Row, operands: list[str], tail: str) -> Op:
    if re.search(r"\b(mul|div):", tail):
        raise ValueError("an output modifier")
    flags = CLAMP if "clamp" in tail else 0
    flags |= SELECTS if row.name.startswith("v_cndmask") else 0
    flags |= APART if _APART.match(row.name) else 0
    made = Op(row, flags=flags, lanes=_lanes(tail))
    given = list(operands)
    for letter in row.result:
        text = given.pop(0)
        kind, reg = _register(re.sub(r"\.[lh]$", "", text)) or (NONE, 0)
        if letter == "m":
            made = made._replace(mask_reg=reg)
        else:
            part = PAIR if letter == "w" else WORD if letter not in "hs" else HIGH if text.endswith(".h") else LOW
            made = made._replace(result=kind, reg=reg, part=part)
    sources = [_next_source(letter, given, made) for letter in row.sources]
    return _selected(made._replace(sources=tuple(sources)), tail)


def _next_source(letter: str, given: list[str], made: Op) -> Source:
    if letter == "o":
        return Source(made.result, WORD, SHIFT if made.part == HIGH else 0, made.reg, made.part)
    if letter == "m" and not given:  # VOP2 and v_dual: it is VCC, and not said
        return Source(SCALAR, MASK, 0, _VCC)
    return _source(given.pop(0), letter)


def _selected(op: Op, tail: str) -> Op:
    """With the halves that `op_sel` and its like name, and with what of a source the result depends on."""
    low, high = _flags(tail, "op_sel", 0), _flags(tail, "op_sel_hi", -1)
    letters, sources = op.row.sources, list(op.sources)
    for i, (letter, one) in enumerate(zip(letters, op.sources, strict=True)):
        if letter == "p":
            sources[i] = _packed(one, low >> i & 1, high >> i & 1, tail, i)
        elif letter == "x" and high != -1 and high >> i & 1:
            needs = WORD if one.kind == CONSTANT else HIGH if low >> i & 1 else LOW
            mods = one.mods | FROM_F16 | (SHIFT if low >> i & 1 else 0)
            sources[i] = one._replace(mods=mods, needs=needs)
        elif letter in "hs" and low >> i & 1:
            sources[i] = one._replace(mods=one.mods | SHIFT, needs=WORD if one.kind == CONSTANT else HIGH)
    if op.part == LOW and (low >> len(letters) & 1 or op.row.name == "v_fma_mixhi_f16"):
        op = op._replace(part=HIGH)
    return op._replace(sources=tuple(_needed(op.row.name, sources)))


def _packed(one: Source, low: int, high: int, tail: str, i: int) -> Source:
    signs = (_flags(tail, "neg_lo", 0) >> i & 1) * NEGATE_LOW | (_flags(tail, "neg_hi", 0) >> i & 1) * NEGATE_HIGH
    mods = SWAP_LOW * low | SWAP_HIGH * (1 - high) | signs
    needs = WORD if low != high or one.kind == CONSTANT else HIGH if low else LOW
    return one._replace(mods=mods, needs=needs)


def _needed(name: str, sources: list[Source]) -> list[Source]:
    """A half of a register that a mask, a shift or a permutation drops need not be written."""
    first = sources[0].value if sources and sources[0].kind == CONSTANT else None
    if name == "v_and_b32" and first is not None:
        sources[1] = _half(sources[1], first & 0xFFFF, first >> 16)
    elif name in ("v_lshlrev_b32", "v_lshrrev_b32") and first is not None and first >= 16:
        sources[1] = _half(sources[1], name == "v_lshlrev_b32", name == "v_lshrrev_b32")
    elif name == "v_lshl_or_b32" and sources[1].kind == CONSTANT and sources[1].value >= 16:
        sources[0] = _half(sources[0], 1, 0)
    elif name == "v_and_or_b32" and sources[1].kind == CONSTANT:
        sources[0] = _half(sources[0], sources[1].value & 0xFFFF, sources[1].value >> 16)
    elif name == "v_bfe_u32" and sources[1].kind == sources[2].kind == CONSTANT:
        start, end = sources[1].value, sources[1].value + sources[2].value
        sources[0] = _half(sources[0], start < 16, end > 16)
    elif name == "v_perm_b32" and sources[2].kind == CONSTANT:
        taken = sources[2].value.to_bytes(4, "little")
        for i, base in ((0, 4), (1, 0)):
            sources[i] = _half(sources[i], {base, base + 1} & {*taken}, {base + 2, base + 3} & {*taken})
    return sources


def _half(one: Source, low: object, high: object) -> Source:
    return one if one.kind == CONSTANT or bool(low) == bool(high) else one._replace(needs=LOW if low else HIGH)


def _lanes(tail: str) -> tuple[int, ...]:
    """Which lane each lane reads, of an operand through DPP; -1 where it is none, which reads 0."""
    found = re.search(r"\b(row_\w+|quad_perm):(\[[\d,]+\]|\d+)|\b(row_half_mirror|row_mirror)\b", tail)
    if found is None or found[1] == "row_mask":
        if "dpp8" in tail or "row_" in tail.replace("row_mask", ""):
            raise ValueError("an exchange of lanes of another kind")
        return ()
    if "row_mask:0xf bank_mask:0xf" not in tail:
        raise ValueError("DPP on a part of the rows")
    kind, value = found[1] or found[3], found[2] or "0"
    moved: dict[str, Callable[[int], int]] = {
        "row_xmask": lambda lane: lane ^ int(value),
        "row_shr": lambda lane: lane - int(value),
        "row_shl": lambda lane: lane + int(value) if lane + int(value) < 16 else -1,
        "row_ror": lambda lane: (lane - int(value)) % 16,
        "row_share": lambda lane: int(value),
        "row_mirror": lambda lane: 15 - lane,
        "row_half_mirror": lambda lane: lane ^ 7,
        "quad_perm": lambda lane: lane & ~3 | int(value.strip("[]").split(",")[lane & 3]),
    }
    row = [moved[kind](lane) for lane in range(16)]
    if min(row) < 0 and "bound_ctrl:1" not in tail:
        raise ValueError("DPP that leaves lanes as they are")
    return tuple(one + base if one >= 0 else -1 for base in (0, 16) for one in row)


def _memory(row: Row, operands: list[str], tail: str) -> Op:
    if row.space == "CONSTANT":
        return _constants(row, operands, tail)
    reads = row.operands in ("read", "signed", "low", "high", "pull")
    returns = row.operands in ("add", "addfloat") and bool(
        re.search(r"\bglc\b|TH_ATOMIC_RETURN", tail) or "_rtn_" in row.name
    )
    given = list(operands)
    made = Op(row, flags=RETURNS if returns else 0)
    if reads or returns:
        text = given.pop(0)
        kind, reg = _register(re.sub(r"\.[lh]$", "", text)) or (NONE, 0)
        part = HIGH if text.endswith(".h") else LOW if text.endswith(".l") else WORD
        made = made._replace(result=kind, reg=reg, part=part)
    address = _source(given.pop(0), "u")
    data = [Source()] * 2
    if not reads or row.operands == "pull":
        data[0] = _stored(row, given.pop(0))
        if row.places == 2:
            data[1] = _stored(row, given.pop(0))
    base = _source(given[0], "w") if row.space == "GLOBAL" and given[0] != "off" else Source()
    if data[0].mods & SHIFT:
        made = made._replace(part=HIGH)
    return made._replace(sources=(address, data[0], base, data[1]), offset=_offsets(row, tail))


def _stored(row: Row, text: str) -> Source:
    one = _source(text, "u")
    high = row.operands == "writehigh" or one.mods & SHIFT
    return one._replace(needs=WORD if row.nbytes >= 4 else HIGH if high else LOW)


def _offsets(row: Row, tail: str) -> tuple[int, int]:
    def value(name: str) -> int:
        found = re.search(rf"\b{name}:(-?\w+)", tail)
        return int(found[1], 0) if found else 0

    if row.places == 1:
        return value("offset"), 0
    step = row.nbytes * (64 if "stride64" in row.name else 1)
    return value("offset0") * step, value("offset1") * step


def _constants(row: Row, operands: list[str], tail: str) -> Op:
    (kind, reg), base = _register(operands[0]) or (NONE, 0), _source(operands[1], "w")
    more, offset = Source(), 0
    register = _register(operands[2])
    if register is None:
        offset = int(operands[2], 0)
    elif operands[2] != "null":
        more = Source(SCALAR, WORD, 0, register[1])
    found = re.search(r"\boffset:(\S+)", tail)
    offset += int(found[1], 0) if found else 0
    return Op(row, result=kind, reg=reg, sources=(base, more), offset=(offset, 0))
