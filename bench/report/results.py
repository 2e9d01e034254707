"""What a report is made of: result files, read and told apart by what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
