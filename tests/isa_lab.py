"""Small kernels for the interpreter's devices, and kernels whose listing is changed behind the compiler's back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hipfire_kernels as hk
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.authoring.args import Arg, Lds
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.building.builder import Artifact
from hipfire_kernels.interpreting import program
from hipfire_kernels.running.devices import isa
from hipfire_kernels.running.devices.isa import IsaDevice

Array = np.ndarray[Any, Any]
ARCHS = ("gfx1100", "gfx1201")
"""One of each generation: the machine knows no further difference."""


def kernel(
    body: str, *args: Arg, block: int = 32, lds: tuple[Lds, ...] = (), matrix: bool = False, name: str = "tried"
) -> Variant:
    """A kernel with this body: a block, or one for each `block` of its n elements."""
    declared = "".join(f"{{{{ lds.{one.name} }}}}\n" for one in lds)
    return hk.KernelFamily(
        name=name,
        doc="a block of elements",
        params={},
        entry=lambda v: name,
        args=lambda v: (*args, hk.Scalar("n", "i32")),
        grid=lambda v, s: (max(1, s.n // block), 1, 1),
        block=block,
        lds=lambda v, arch: lds,
        tolerance=hk.Tolerance(0),
        body=("{% include matrix %}\n" if matrix else "")
        + f"{{{{ signature }}}} {{\n{declared}const int at = block_x() * {block} + thread();\n{body}\n}}\n",
    ).variant()


def launch(variant: Variant, on: IsaDevice, **given: Any) -> dict[str, Array]:
    """Run a kernel on copies of numpy arrays: the copies, as they are afterwards."""
    values = {name: on.to_device(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    hk.launch(variant, on, **values)
    on.synchronize()
    return {name: on.to_host(values[name]) for name, x in given.items() if isinstance(x, np.ndarray)}


def built(variant: Variant, arch: str) -> Artifact:
    """As a device of the interpreter builds it."""
    return hk.build(variant, arch, "clang")


def replace_listing(variant: Variant, arch: str, assembly: str) -> program.Program:
    """Have all devices of this process run another text for a kernel, which no assembler has seen."""
    artifact = built(variant, arch)
    took = artifact.resources
    made = program.read(
        artifact.code,
        assembly,
        variant.entry,
        lookup(arch),
        artifact.source,
        (took.vgprs or 0) + 32,  # for what an edit uses besides
        took.max_workgroup or 0,
    )
    isa._programs[artifact.key] = made
    return made


def forget(variant: Variant, arch: str) -> None:
    """The compiler's own listing again."""
    isa._programs.pop(built(variant, arch).key, None)


def edited(variant: Variant, arch: str, edit: Callable[[list[str]], list[str]]) -> IsaDevice:
    """A new device that runs a kernel with its lines of assembly edited."""
    replace_listing(variant, arch, "\n".join(edit(built(variant, arch).assembly.splitlines())))
    return IsaDevice(arch)


def instructions(lines: Sequence[str], pattern: str) -> list[int]:
    """Where in an assembly text the instructions stand that begin with a pattern."""
    return [i for i, line in enumerate(lines) if re.match(rf"\s+(?:{pattern})", line)]
