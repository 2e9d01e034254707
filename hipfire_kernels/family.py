"""What a kernel declaration is made of.

A `KernelFamily` is the single source of everything about a kernel except its body: parameters and their legal
values, entry point, argument list, launch geometry, LDS, tolerance. `Variant` is a family with its parameters
chosen. The argument list serves three readers: the template's C signature, the check of the arrays at a launch, and
the packing of the kernel arguments; none of them is written by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .archs import WAVE
from .errors import InputError

C_TYPES = {"f32": "float", "i32": "int", "u8": "unsigned char"}
"""Declared dtype to the C type in a kernel's signature."""

Dim = int | str
"""One extent of a declared shape: a number, or the name of a symbol bound by the arrays of a launch."""


@dataclass(frozen=True)
class Tensor:
    """A pointer argument: a C-contiguous array.

    Attributes:
        name: the argument's name, in the declaration, the template and the launch.
        dtype: `f32`, `i32` or `u8`.
        shape: extents; a string names a symbol that must agree between all arguments of a launch.
        writes: the kernel writes this array.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    writes: bool = False


@dataclass(frozen=True)
class Scalar:
    """A by-value argument. One that shares its name with a shape symbol is filled in from the arrays."""

    name: str
    dtype: str


Arg = Tensor | Scalar


@dataclass(frozen=True)
class Lds:
    """An LDS array: C type (4 bytes an element), name, number of elements."""

    name: str
    ctype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array; every LDS element is 4 bytes wide."""
        return 4 * self.count


@dataclass(frozen=True)
class Tolerance:
    """Limit on max|diff| / max|reference| of the worst (row, head) against the float64 oracle."""

    worst_row: float


@dataclass(frozen=True)
class KernelFamily:
    """One kernel family: its whole truth apart from the body, which is in `templates/<name>.hip.j2`.

    Attributes:
        name: the family's name and its template's.
        doc: one line: what one block owns.
        params: parameter name to its legal values. `variants()` is their product.
        entry: the kernel's symbol for a variant.
        args: the argument list for a variant, in signature order.
        extents: names a launch must give that are no kernel argument but shape the grid.
        grid: blocks in x, y, z, from the variant and the bound symbols of a launch.
        block: threads in a block, a multiple of 32.
        lds: the LDS arrays.
        oracle: which check of `parity` holds this family against `reference`.
        tolerance: the limit that check applies.
        graph_safe: a captured launch stays right as the context grows: what it depends on is read on the device, or can
            be given for the whole capacity. Routes of other families are refused while capturing or recording.
        where: combinations of parameters that exist; all by default.
    """

    name: str
    doc: str
    params: Mapping[str, tuple[Any, ...]]
    entry: Callable[[Variant], str]
    args: Callable[[Variant], tuple[Arg, ...]]
    grid: Callable[[Variant, SimpleNamespace], tuple[int, int, int]]
    oracle: str
    tolerance: Tolerance
    extents: tuple[str, ...] = ()
    block: int = WAVE
    lds: Callable[[Variant], tuple[Lds, ...]] = field(default=lambda v: ())
    graph_safe: bool = False

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.hip.j2"

    def variants(self) -> Iterator[Variant]:
        """Every legal variant, in the order of the declared values."""
        for values in itertools.product(*self.params.values()):
            yield Variant(self, tuple(zip(self.params, values, strict=True)))

    def variant(self, **params: Any) -> Variant:
        """The variant with these parameters.

        Raises:
            InputError: (a ValueError) a parameter is unknown, missing or has a value that is not declared.
        """
        for name in params:
            if name not in self.params:
                raise InputError(f"{self.name} has no parameter {name!r}; its parameters are {', '.join(self.params)}")
        for name, legal in self.params.items():
            if name not in params:
                raise InputError(f"{self.name} needs {name}=, one of {_listed(legal)}")
            if params[name] not in legal:
                raise InputError(
                    f"{self.name}: {name}={params[name]!r} is not declared; legal values: {_listed(legal)}"
                )
        return Variant(self, tuple((name, params[name]) for name in self.params))


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class Variant:
    """A family with its parameters chosen. A parameter reads as an attribute: `variant.head_dim`."""

    family: KernelFamily
    params: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        for key, value in object.__getattribute__(self, "params"):
            if key == name:
                return value
        raise AttributeError(f"{self.family.name} has no parameter {name!r}")

    def __hash__(self) -> int:
        return hash((self.family.name, self.params))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and self.family is other.family and self.params == other.params

    def __repr__(self) -> str:
        return f"<Variant {self.name}>"

    @property
    def name(self) -> str:
        """Unique, readable: the entry point."""
        return self.entry

    @property
    def entry(self) -> str:
        """The kernel's symbol."""
        return self.family.entry(self)

    @property
    def args(self) -> tuple[Arg, ...]:
        """The argument list, in signature order."""
        return self.family.args(self)

    @property
    def lds(self) -> tuple[Lds, ...]:
        """The LDS arrays."""
        return self.family.lds(self)

    @property
    def lds_bytes(self) -> int:
        """LDS of one block, in bytes."""
        return sum(region.nbytes for region in self.lds)

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return self.family.block

    def source(self, arch: str = "gfx1100") -> str:
        """The rendered HIP source for an arch. Needs no compiler.

        Raises:
            RenderError: the kernel does not fit the arch, or the template uses a name nobody defines.
        """
        from .render import render

        return render(self, arch)
