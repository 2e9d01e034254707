"""What a kernel declaration is made of.

A `KernelFamily` is the single source of everything about a kernel except its body: parameters and their legal
values, entry point, argument list, launch geometry, LDS, tolerance. `Variant` is a family with its parameters
chosen. The argument list serves three readers: the template's C signature, the check of the arrays at a launch, and
the packing of the kernel arguments; none of them is written by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hipfire_kernels.archs import WAVE, Arch
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.errors import InputError

C_TYPES = {"f32": "float", "f16": "unsigned short", "i32": "int", "u8": "unsigned char"}
"""Declared dtype to the C type in a kernel's signature. f16 is its bits: not every compiler has the type."""

Dim = int | str
"""One extent of a declared shape: a number, or the name of a symbol bound by the arrays of a launch."""


@dataclass(frozen=True)
class Tensor:
    """A pointer argument: a C-contiguous array.

    Attributes:
        name: the argument's name, in the declaration, the template and the launch.
        dtype: `f32`, `f16`, `i32` or `u8`.
        shape: extents; a string names a symbol that must agree between all arguments of a launch.
        writes: the kernel writes this array.
        align: bytes its address must be a multiple of, where that is more than its dtype asks for.
        largest: magnitude above which the results of the rows that read it may be infinite or NaN; never a plausible
            number. Of Q8_0 blocks what 128 times the scale is, of queries what they are times the scale of the scores
            and log2(e).
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    writes: bool = False
    align: int = 1
    largest: float = math.inf


@dataclass(frozen=True)
class Scalar:
    """A by-value argument. One that shares its name with a shape symbol is filled in from the arrays."""

    name: str
    dtype: str


Arg = Tensor | Scalar


LDS_TYPES = {"float": 4, "int": 4, "unsigned": 4, "unsigned short": 2, "unsigned char": 1, "Quad": 16, "Chunk": 16}
"""C type of an LDS array's elements to their bytes. A `Quad` is four floats, a `Chunk` eight f16, loaded at once."""

LDS_ALIGNMENT = 16
"""Where an LDS array may begin, so that the widest load is legal."""


@dataclass(frozen=True)
class Lds:
    """An LDS array: name, C type, number of elements."""

    name: str
    ctype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes the array takes, up to where the next may begin."""
        return -(-LDS_TYPES[self.ctype] * self.count // LDS_ALIGNMENT) * LDS_ALIGNMENT


@dataclass(frozen=True)
class Tolerance:
    """Limit on max|diff| / max|reference| of the worst (row, head) against the float64 oracle.

    Attributes:
        worst_row: the limit.
        grows: queries are rounded before they are multiplied: the limit is for standard normal inputs, and larger
            products have a larger one (`parity_split.stretch`).
        per_key: added to the limit for each key of a record. Where one f32 takes the whole sum, equal weights and
            values of one sign make all its roundings go one way: by 2^-25 of the sum each on average, half the bound of
            Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.
    """

    worst_row: float
    grows: bool = False
    per_key: float = 0.0

    def limit(self, keys: int) -> float:
        """The limit where a record covers so many keys."""
        return self.worst_row + self.per_key * keys


@dataclass(frozen=True)
class Site:
    """What free choices are made for: multiprocessors of the device, KV heads and query rows of one launch."""

    multiprocessors: int
    n_kv_heads: int
    rows: int


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
        block: threads in a block, a multiple of 32; a function where it depends on the arch.
        lds: the LDS arrays, which may depend on the arch.
        oracle: which check of `parity` holds this family against `reference`.
        tolerance: the limit that check applies; a function where it depends on the variant.
        records: what one partial record covers: a "tile" of 128 keys, or a "split" of the context, of which there are
            as many whatever the context; "" for a family that writes none.
        exact: a row has the same bits in any call, so that no free choice which changes them (the number of splits)
            may follow the rows beside it, nor the context, which they share.
        graph_safe: a captured launch stays right as the context grows: what it depends on is read on the device, or can
            be given for the whole capacity. Routes of other families are refused while capturing or recording.
        space: the free choices: names to the values worth timing, for a variant and where it is launched; the default
            comes first. A name is a parameter of which any value serves, or "splits", the records of a family whose
            records cover splits. None of them changes the result by more than the order of its sums.
        early: variants whose kernel waits itself for the launch ahead of it, and so may begin before that has ended.
        where: combinations of parameters that exist; all by default.
        refuse: why a launch with these extents would be wrong although each argument is legal; None where it would not.
    """

    name: str
    doc: str
    params: Mapping[str, tuple[Any, ...]]
    entry: Callable[[Variant], str]
    args: Callable[[Variant], tuple[Arg, ...]]
    grid: Callable[[Variant, SimpleNamespace], tuple[int, int, int]]
    oracle: str
    tolerance: Tolerance | Callable[[Variant], Tolerance]
    extents: tuple[str, ...] = ()
    block: int | Callable[[Variant, Arch], int] = WAVE
    lds: Callable[[Variant, Arch], tuple[Lds, ...]] = field(default=lambda v, arch: ())
    records: str = ""
    exact: bool = True
    graph_safe: bool = False
    space: Callable[[Variant, Site], Mapping[str, tuple[int, ...]]] = field(default=lambda v, site: {})
    early: Callable[[Variant], bool] = field(default=lambda v: False)
    where: Callable[[Variant], bool] = field(default=lambda v: True)
    refuse: Callable[[Variant, SimpleNamespace], str | None] = field(default=lambda v, s: None)

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.hip.j2"

    def variants(self) -> Iterator[Variant]:
        """Every legal variant, in the order of the declared values."""
        for values in itertools.product(*self.params.values()):
            found = Variant(self, tuple(zip(self.params, values, strict=True)))
            if self.where(found):
                yield found

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
        found = Variant(self, tuple((name, params[name]) for name in self.params))
        if not self.where(found):
            together = ", ".join(f"{name}={value}" for name, value in found.params)
            raise InputError(f"{self.name} has no variant with {together} together; `variants()` lists those it has")
        return found


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
    def tolerance(self) -> Tolerance:
        """The limit its parity check applies."""
        limit = self.family.tolerance
        return limit if isinstance(limit, Tolerance) else limit(self)

    def lds(self, arch: str = "gfx1100") -> tuple[Lds, ...]:
        """The LDS arrays on an arch."""
        return self.family.lds(self, lookup(arch))

    def lds_bytes(self, arch: str = "gfx1100") -> int:
        """LDS of one block on an arch, in bytes."""
        return sum(region.nbytes for region in self.lds(arch))

    def fits(self, arch: str) -> bool:
        """Whether one block's LDS is there on an arch."""
        return self.lds_bytes(arch) <= lookup(arch).lds_bytes

    def threads(self, arch: str = "gfx1100") -> int:
        """Threads of one block on an arch."""
        block = self.family.block
        return block if isinstance(block, int) else block(self, lookup(arch))

    def source(self, arch: str = "gfx1100") -> str:
        """The rendered HIP source for an arch. Needs no compiler.

        Raises:
            RenderError: the kernel does not fit the arch, or the template uses a name nobody defines.
        """
        from hipfire_kernels.authoring.render import render

        return render(self, arch)
