"""The parts of a page: sections of plots, tables and A/B runs; how numbers become cells, rows groups, names colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hipfire_kernels.bench.report.plots import Plot

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One cell: what is shown, and what it sorts by where that is another thing.

    Attributes:
        tone: "good", "bad" or none.
        note: a second line, less loud.
    """

    text: str
    by: float | str | None = None
    tone: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose columns sort.

    Attributes:
        numeric: columns that are set right and never broken.
        prose: the column that takes the width that is left, and is broken anywhere.
        folded: closed until it is clicked.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[str] = ()
    prose: str | None = None
    folded: bool = False


@dataclass(frozen=True)
class Run:
    """One A/B run: its plot, its verdict, and what stands beside it."""

    title: str
    verdict: str
    shown: bool
    plot: Plot | None
    facts: Sequence[tuple[str, str]]


@dataclass
class Section:
    """A part of the page.

    Attributes:
        id: for links.
        title, intro: above it.
        plots, tables, runs: in it, in this order.
        map: the data of the route map, for the page's script.
    """

    id: str
    title: str
    intro: str
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    map: dict[str, Any] | None = None


def number(value: float | None, form: str = "g") -> Cell:
    """A number, or a dash where there is none."""
    return Cell("-", float("-inf")) if value is None else Cell(format(value, form), value)


def compiler(toolchain: str | None) -> str | None:
    """A toolchain's identity, without its name in front where it begins with that: `nvrtc: nvrtc 13.0`."""
    name, _, identity = (toolchain or "").partition(": ")
    return identity if identity.startswith(name) else toolchain


def grouped(rows: Iterable[Mapping[str, Any]], *names: str) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """Rows by the values of some of their fields, in the order of these."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    return [(values, list(group)) for values, group in groupby(sorted(rows, key=key), key)]


class Series:
    """One colour and marker for each name, in all plots of a page."""

    def __init__(self, names: Iterable[str]) -> None:
        self._indices = {name: index for index, name in enumerate(names)}

    def index(self, name: str) -> int:
        """The index of a name; a new one for a new name."""
        return self._indices.setdefault(name, len(self._indices))
