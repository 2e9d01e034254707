"""What a report is made of: result files read and told apart by what they hold, and the parts of a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from hipfire_kernels.bench.report_plots import Plot
from hipfire_kernels.dispatch.record import Evidence, load
from hipfire_kernels.errors import InputError

Document = dict[str, Any]


@dataclass
class Results:
    """The files of a report by kind.

    Attributes:
        tables: of `hfk bench`.
        peers: other libraries on the same shapes.
        evidence: of `hfk qualify`.
        runs: of `hfk ab`.
        builds: of `hfk build --json`.
        parity: grids of `bench.on_device`.
        fuzz: campaigns of `hfk fuzz`, with the name of the file.
        names: the files that are shown.
        passed_over: files of no kind that a report shows.
    """

    tables: list[Document] = field(default_factory=list)
    peers: list[Document] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    runs: list[Document] = field(default_factory=list)
    builds: list[Document] = field(default_factory=list)
    parity: list[Document] = field(default_factory=list)
    fuzz: list[tuple[str, Document]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def read(files: Iterable[Path]) -> Results:
    """Read result files, in order.

    Raises:
        InputError: one cannot be read, is no JSON, or is evidence that is not right.
    """
    found = Results()
    for file in files:
        text = _text(file)
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InputError(f"{file} is no JSON ({error}); required: result files of hfk") from error
        kinds = [_add(found, part, text, file) for part in (document if isinstance(document, list) else [document])]
        (found.names if any(kinds) else found.passed_over).append(file.name)
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error})") from error


def _add(found: Results, document: Any, text: str, file: Path) -> bool:
    """Put a document where it belongs; whether it is of a known kind."""
    if not isinstance(document, dict):
        return False
    rows = document.get("rows") or [{}]
    if document.get("kind") == "ab":
        found.runs.append(document)
    elif {"cases", "ledger", "worst", "failures"} <= document.keys():
        found.fuzz.append((file.name, document))
    elif "records" in document:
        found.evidence += load(text, file.name)
    elif "kernels" in document:
        found.builds.append(document)
    elif "grid" in document:
        found.parity.append(document)
    elif "route" in rows[0]:
        found.tables.append(document)
    elif {"who", "head_dim"} <= rows[0].keys():  # of verify attention; draft attention has a table of its own
        found.peers.append(document)
    else:
        return False
    return True


# ---- parts of a page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell: what is shown, and what it sorts by where that is another thing. `tone`: "good", "bad" or none."""

    text: str
    by: float | str | None = None
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose columns sort; those named in `numeric` are set right. `folded`: closed until it is clicked."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[str] = ()
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
    map: Document | None = None


def number(value: float | None, form: str = "g") -> Cell:
    """A number, or a dash where there is none."""
    return Cell("-", float("-inf")) if value is None else Cell(format(value, form), value)


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
