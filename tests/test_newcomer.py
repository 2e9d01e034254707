"""docs/adding-a-kernel.md, done as it says, in a copy of the repository: each edit, each command, what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree_lab import ROOT, Tree

DOC = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
SECTION = DOC[DOC.index("## A variant") : DOC.index("## A family")]


def blocks() -> Iterator[tuple[str, str]]:
    """Kind and text of each edit and each command with its output, in order."""
    for kind, text in re.findall(r"```(diff|console)\n(.*?)```", SECTION, re.DOTALL):
        if kind == "diff":
            yield kind, text
        else:
            yield from (("console", part) for part in re.split(r"(?m)^\$ ", text)[1:])


def edit(tree: Tree, text: str) -> None:
    """Apply a diff: pieces between lines of @@, each of a text that is there once."""
    title, _, body = text.partition("\n")
    for piece in body.split("@@\n"):
        lines = piece.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in marks) for marks in (" -", " +"))
        tree.edit(title.removeprefix("--- "), old, new)


def shape(text: str) -> str:
    """A text without its figures, and without how far apart they are."""
    plain = re.sub(r"(?<![\w.])\d[\d.]*(?:e[-+]\d+)?", "#", text)
    plain = re.sub(r"(?m)(?<= )(?:yes|no) *$", "cached", plain)  # what else has been built is not the page's subject
    return re.sub(r"#(?: #)+", "#", re.sub(r" +", " ", plain)).strip()


def run(tree: Tree, text: str) -> None:
    """Run a command and hold what it prints against what the page says: `...` stands for anything."""
    command, _, expected = text.partition("\n")
    program, *arguments = command.split()
    assert program == "hfk"
    done = tree.hfk(*arguments)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    wanted = ".*".join(re.escape(part) for part in shape(expected).split("..."))
    assert re.fullmatch(wanted, shape(done.stdout), re.DOTALL), f"{command}\n{done.stdout}"


def test_a_variant_from_nothing_to_qualified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    tree = Tree(tmp_path)
    kinds = []
    for kind, text in blocks():
        (edit if kind == "diff" else run)(tree, text)
        kinds.append(kind)
    assert kinds.count("diff") == 2
    assert kinds.count("console") == 9
    assert [file.name for file in tree.evidence.iterdir()] == ["host.json"]
