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
    for example in examples[:3]:
        exec(compile(example, "README.md", "exec"), scope)


def test_the_declaration_example_is_legal() -> None:
    from hipfire_kernels.archs import arch
    from hipfire_kernels.authoring.args import Scalar, Tensor
    from hipfire_kernels.authoring.family import KernelFamily, Tolerance
    from hipfire_kernels.authoring.render import _signature

    scope: dict[str, object] = {c.__name__: c for c in (KernelFamily, Scalar, Tensor, Tolerance)}
    exec(compile(blocks("python")[3], "README.md", "exec"), scope)
    family = scope["SCALE"]
    assert isinstance(family, KernelFamily)
    assert "float* __restrict__ x" in _signature(family.variant(head_dim=128), arch("gfx1100"))


def test_ci_takes_its_test_command_from_here() -> None:
    assert 'grep -m1 "pytest" README.md' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    setup = [block for block in blocks("sh") if "venv" in block]
    assert len(setup) == 2
    assert "hfk demo" in setup[0]
    assert "pytest" in setup[1]
