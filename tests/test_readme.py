"""The README's code runs as printed, and its commands are the ones that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_python_examples_run() -> None:
    scope: dict[str, object] = {}
    examples = blocks("python")
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, "README.md", "exec"), scope)


def test_ci_takes_its_test_command_from_here() -> None:
    assert 'grep -m1 "pytest" README.md' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    setup = [block for block in blocks("sh") if "venv" in block]
    assert len(setup) == 2
    assert "hfk demo" in setup[0]
    assert "pytest" in setup[1]
