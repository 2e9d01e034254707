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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hipfire_kernels.archs import WAVE, Arch
from hipfire_kernels.archs import arch as lookup
from hipfire_kernels.authoring import declaration
from hipfire_kernels.authoring.args import Arg, Lds, Scalar, Tensor
from hipfire_kernels.authoring.render import beside_parameters, render
from hipfire_kernels.authoring.templates import Template
from hipfire_kernels.errors import InputError


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
        least_weight: what the weight of a key may be off by, however small it is, where the largest of the row is 1:
            the range of what weights are rounded to. Drawn cases, whose values may be 10^9 times as large where the
            weight is small, allow for it; the grid does not.
    """

    worst_row: float
    grows: bool = False
    per_key: float = 0.0
    least_weight: float = 0.0

    def limit(self, keys: int) -> float:
        """The limit where a record covers so many keys."""
        return self.worst_row + self.per_key * keys


@dataclass(frozen=True)
class Site:
    """What free choices are made for: multiprocessors of the device, KV heads and query rows of one launch."""

    multiprocessors: int
    n_kv_heads: int
    rows: int


@dataclass(frozen=True, eq=False)
class KernelFamily:
    """One kernel family: its whole truth apart from the body, which is a Jinja template.

    It is checked where it is declared: a missing template, arguments of one name, a grid that uses a name nobody gives
    and so on are an InputError there.

    Attributes:
        name: the family's name; `template` and `body` left out, its template is the library's `<name>.hip.j2`.
        doc: one line: what one block owns.
        params: parameter name to its legal values. `variants()` is their product.
        entry: the kernel's symbol for a variant.
        args: the argument list for a variant, in signature order.
        extents: least and greatest value of symbols in drawn cases. A name that is neither a symbol of the shapes nor a
            scalar is one that a launch must give beside the arguments, for the grid.
        grid: blocks in x, y, z, from the variant and the bound symbols of a launch.
        block: threads in a block, a multiple of 32; a function where it depends on the arch.
        lds: the LDS arrays, which may depend on the arch.
        reference: what the kernel must compute: a function of those of its arguments that it names, arrays as numpy
            arrays and scalars as numbers, that returns the written arrays by name (the array itself where there is one)
            in float64. It is given copies. Its cases are drawn from the declaration.
        oracle: in place of a reference, a `checking.oracle.Oracle`, which draws and checks cases in its own way; or
            where to import one from, as "package.module:NAME".
        tolerance: the limit that check applies; a function where it depends on the variant.
        records: what one partial record covers: a "tile" of 128 keys, or a "split" of the context, of which there are
            as many whatever the context; "" for a family that writes none.
        deterministic: the same arguments give the same bits, whatever order threads and blocks run in; not so where
            floats are added by atomics.
        exact: a row has the same bits in any call, so that no free choice which changes them (the number of splits)
            may follow the rows beside it, nor the context, which they share.
        graph_safe: a captured launch stays right as the context grows: what it depends on is read on the device, or can
            be given for the whole capacity. Routes of other families are refused while capturing or recording.
        space: the free choices: names to the values worth timing, for a variant and where it is launched; the default
            comes first. A name is a parameter of which any value serves, or "splits", the records of a family whose
            records cover splits. None of them changes the result by more than the order of its sums.
        early: variants whose kernel waits itself for the launch ahead of it, and so may begin before that has ended.
        template: the file of the body. Headers that it includes are looked for beside it, then among the library's.
        body: the body itself, in place of a file.
        where: combinations of parameters that exist; all by default.
        refuse: why a launch with these extents would be wrong although each argument is legal; None where it would not.
    """

    name: str
    doc: str
    params: Mapping[str, tuple[Any, ...]]
    entry: Callable[[Variant], str]
    args: Callable[[Variant], tuple[Arg, ...]]
    grid: Callable[[Variant, SimpleNamespace], tuple[int, int, int]]
    tolerance: Tolerance | Callable[[Variant], Tolerance]
    reference: Callable[..., Any] | None = None
    oracle: Any = None
    extents: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    block: int | Callable[[Variant, Arch], int] = WAVE
    lds: Callable[[Variant, Arch], tuple[Lds, ...]] = field(default=lambda v, arch: ())
    records: str = ""
    deterministic: bool = True
    exact: bool = True
    graph_safe: bool = False
    space: Callable[[Variant, Site], Mapping[str, tuple[int, ...]]] = field(default=lambda v, site: {})
    early: Callable[[Variant], bool] = field(default=lambda v: False)
    template: Path | None = None
    body: str | None = None
    where: Callable[[Variant], bool] = field(default=lambda v: True)
    refuse: Callable[[Variant, SimpleNamespace], str | None] = field(default=lambda v, s: None)

    def __post_init__(self) -> None:
        declaration.check_name(self.name)
        declaration.check_params(self.name, self.params, dir(Variant))
        declaration.check_oracle(self.name, self.reference, self.oracle)
        declaration.check_extents(self.name, self.extents)
        if self.template is not None and self.body is not None:
            raise InputError(f"{self.name} has a template and a body; give one of them")
        declaration.check_template(self.name, self.origin)
        entries: dict[str, str] = {}
        for variant in self.variants():
            which = ", ".join(f"{name}={value}" for name, value in variant.params) or "its one variant"
            declaration.check_entry(self.name, variant.entry, entries, which)
            entries[variant.entry] = which
            self._check(variant)
        if not entries:
            raise InputError(f"{self.name}: `where` lets no combination of its parameters exist")
        given = beside_parameters(next(self.variants()), lookup("gfx1100"))
        declaration.check_free(self.name, self.params, given, "that every template has")

    def _check(self, variant: Variant) -> None:
        args = variant.args
        declaration.check_args(self.name, args)
        declaration.check_reference(self.name, self.reference, args)
        declaration.check_lds(self.name, variant.lds())
        symbols = {extent for arg in args if isinstance(arg, Tensor) for extent in arg.shape if isinstance(extent, str)}
        known = sorted({*symbols, *self.extents, *(arg.name for arg in args if isinstance(arg, Scalar))})
        declaration.check_grid(self.name, lambda s: self.grid(variant, s), known)

    def __repr__(self) -> str:
        return f"<KernelFamily {self.name} ({', '.join(self.params)})>"

    @property
    def origin(self) -> Template:
        """Where the body is."""
        if self.body is not None:
            return Template(f"body of {self.name}", body=self.body)
        if self.template is not None:
            path = Path(self.template).absolute()
            return Template(path.name, path.parent)
        return Template(f"{self.name}.hip.j2")

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
        chosen = []
        for name, legal in self.params.items():
            if name not in params:
                raise InputError(f"{self.name} needs {name}=, one of {_listed(legal)}")
            given = params[name]
            value = given.item() if isinstance(given, np.generic) else given
            if value not in legal or type(value) is not type(legal[legal.index(value)]):  # 8.0 is in (8,) too
                raise InputError(f"{self.name}: {name}={given!r} is not declared; legal values: {_listed(legal)}")
            chosen.append((name, value))
        found = Variant(self, tuple(chosen))
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
    def doc(self) -> str:
        """What one block owns."""
        return self.family.doc

    @property
    def template(self) -> Template:
        """Where the body is."""
        return self.family.origin

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
        return render(self, arch)
