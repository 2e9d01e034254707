"""What `machine/table.h` and `machine/findings.h` say, line by line: the machine compiles them, Python reads them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_ROW = re.compile(r"^(VECTOR|SCALAR|SPECIAL|MEMORY)\((\w+), (\w+), (\w+), (\w+)(?:, (\w+), (\d+), (\d+)\)$)?", re.M)
_FINDING = re.compile(r'^(NOTE|STOP)\((\w+), "([^"]*)"\)$', re.M)


@dataclass(frozen=True)
class Row:
    """One instruction.

    Attributes:
        code: its number in the machine.
        kind: `VECTOR`, `SCALAR`, `SPECIAL` or `MEMORY`.
        name, name12: what gfx11 and gfx12 call it.
        operands: result and sources, in the letters that the table explains; of memory how it is accessed.
        section: of AMD's ISA documents, chapter "Instructions".
        space: which memory; empty for the others, as `nbytes` and `places` are 0.
        nbytes: of a lane, at each address.
        places: how many addresses a lane has.
    """

    code: int
    kind: str
    name: str
    name12: str
    operands: str
    section: str
    space: str = ""
    nbytes: int = 0
    places: int = 0

    @property
    def result(self) -> str:
        """The letters of what it sets."""
        return self.operands.partition("_")[0]

    @property
    def sources(self) -> str:
        """The letters of its sources."""
        return self.operands.partition("_")[2].replace("_", "")


@dataclass(frozen=True)
class Kind:
    """A kind of finding: its name, what is said of it, and whether it ends the block."""

    name: str
    text: str
    stops: bool


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every instruction, in the order of their codes."""
    found = _ROW.findall(part("table.h"))
    return tuple(
        Row(code, kind, name, name12, operands, section, space, int(nbytes or 0), int(places or 0))
        for code, (kind, name, name12, operands, section, space, nbytes, places) in enumerate(found)
    )


@functools.cache
def by_name(gfx12: bool) -> Mapping[str, Row]:
    """The instructions by what an arch's assembler calls them."""
    return {row.name12 if gfx12 else row.name: row for row in rows()}


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """What can be found, in the order of their numbers."""
    return tuple(Kind(name, text, how == "STOP") for how, name, text in _FINDING.findall(part("findings.h")))


def part(name: str) -> str:
    """The text of a file of the machine."""
    return (resources.files("hipfire_kernels.interpreting") / "machine" / name).read_text(encoding="utf-8")


def source() -> str:
    """The machine as one text, each file where it is included."""

    def included(match: re.Match[str]) -> str:
        name = match[1]
        return f'#line 1 "{name}"\n{_INCLUDE.sub(included, part(name))}'

    return _INCLUDE.sub(included, part("machine.c"))


_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.M)
