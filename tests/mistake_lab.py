"""Typical mistakes in somebody's first kernel: each an edit of a package that is right, and what `hfk` shows of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent / "outside" / "rowkernels"
KERNELS, RMS, HEADER = "kernels.py", "templates/rms_norm.hip.j2", "templates/elements.h"
PARITY = "parity rms_norm_f32 --quick"


@dataclass(frozen=True)
class Mistake:
    """In `file`, `old` becomes `new`; then `hfk` runs `command`."""

    name: str
    file: str
    old: str
    new: str
    command: str = PARITY


MISTAKES = (
    Mistake("a misspelt Jinja name", RMS, "i += {{ block }}) {", "i += {{ blok }}) {"),
    Mistake("an LDS array that is not declared", RMS, "{{ lds.parts }}", "{{ lds.part }}"),
    Mistake("an include that is not there", RMS, '"elements.h"', '"element.h"'),
    Mistake("a Jinja block that nobody ends", RMS, "    block_sync();\n", "    {% if block > 32 %}block_sync();\n"),
    Mistake("a missing semicolon in a header", HEADER, "put(float* row, int i, float x) { row[i] = x; }", "put(float* row, int i, float x) { row[i] = x }"),
    Mistake("a misspelt word of the vocabulary", RMS, "wave_sum(sum)", "wavesum(sum)"),
    Mistake("a value of another type", RMS, "float sum = 0.0f;", "float* sum = 0.0f;"),
    Mistake("writing to an input", RMS, "put(out + first, i,", "put(x + first, i,"),
    Mistake("a number ahead of the arrays", KERNELS, '        Tensor("x", v.dtype, ("rows", "d"), largest', '        Scalar("n", "i32"),\n        Tensor("x", v.dtype, ("rows", "d"), largest'),
    Mistake("an unknown dtype", KERNELS, 'Tensor("w", v.dtype, ("d",))', 'Tensor("w", "half", ("d",))'),
    Mistake("an output that is not declared as written", KERNELS, '("rows", "d"), writes=True),\n        Scalar("d", "i32"),\n        Scalar("eps"', '("rows", "d")),\n        Scalar("d", "i32"),\n        Scalar("eps"'),
    Mistake("a reference that names another argument", KERNELS, "def rms_norm(x, w, eps):", "def rms_norm(x, weight, eps):"),
    Mistake("a grid that uses another name", KERNELS, "grid=lambda v, s: (s.rows, 1, 1),\n    block=128,\n    lds", "grid=lambda v, s: (s.batch, 1, 1),\n    block=128,\n    lds"),
    Mistake("a missing barrier", RMS, "    block_sync();\n", ""),
    Mistake("another stride", RMS, "(long long)block_x() * d;", "(long long)block_x() * (d + 4);"),
    Mistake("one element too many", RMS, "for (int i = thread(); i < d; i += {{ block }}) {", "for (int i = thread(); i <= d; i += {{ block }}) {"),
    Mistake("one element before the first", RMS, "element(x + first, i);", "element(x + first, i - 1);"),
    Mistake("too little LDS", KERNELS, 'Lds("parts", "float", 4)', 'Lds("parts", "float", 2)'),
    Mistake("a sum of a wave by some of its lanes", RMS, "    sum = wave_sum(sum);", "    if (lane() < 7) sum = wave_sum(sum);"),
    Mistake("a barrier that some threads skip", RMS, "    block_sync();\n", "    if (thread() < 40) block_sync();\n"),
    Mistake("LDS read before it is written", RMS, "    if (lane() == 0) parts[wave()] = sum;\n", "    if (lane() == 0) parts[wave()] += sum;\n"),
    Mistake("a sum in f16", RMS, "float sum = 0.0f;", "_Float16 sum = 0;"),
    Mistake("blocks for one row only", KERNELS, "grid=lambda v, s: (s.rows, 1, 1),\n    block=128,\n    lds", "grid=lambda v, s: (1, 1, 1),\n    block=128,\n    lds"),
    Mistake("a scalar declared as another type", KERNELS, 'Scalar("eps", "f32", between=(1e-6, 1e-3))', 'Scalar("eps", "i32", between=(1e-6, 1e-3))'),
    Mistake("a tolerance of another dtype", KERNELS, '"f16": Tolerance(1e-3)', '"f16": Tolerance(1e-5)', "parity rms_norm_f16 --quick"),
    Mistake("a parameter that hides a name", KERNELS, '"dtype": DTYPES, "width": (128, 256)}', '"dtype": DTYPES, "threads": (128, 256)}'),
)  # fmt: skip


def make(mistake: Mistake, folder: Path) -> Path:
    """A copy of the declarations and templates with the mistake in it. Gives the file for `--families`."""
    shutil.copytree(PACKAGE, folder / "rows")
    path = folder / "rows" / mistake.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mistake.old) == 1, (mistake.name, text.count(mistake.old))
    path.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    return folder / "rows" / KERNELS
