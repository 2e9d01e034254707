"""What a kernel takes: pointer and by-value arguments, and the LDS arrays of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

C_TYPES = {
    "f32": "float",
    "f16": "unsigned short",
    "bf16": "unsigned short",
    "f64": "double",
    "i8": "signed char",
    "u8": "unsigned char",
    "i16": "short",
    "i32": "int",
    "u32": "unsigned",
    "i64": "long long",
}
"""Declared dtype to the C type in a kernel's signature. f16 and bf16 are bits: not every compiler has the types."""

FLOATS = {"f16": 65520.0, "bf16": (2 - 2.0**-8) * 2.0**127, "f32": (2 - 2.0**-24) * 2.0**127, "f64": math.inf}
"""The dtypes of them that hold fractions, with the smallest magnitude that rounds to infinity."""

Dim = int | str
"""One extent of a declared shape: a number, or the name of a symbol bound by the arrays of a launch."""


@dataclass(frozen=True)
class Tensor:
    """A pointer argument: a C-contiguous array.

    Attributes:
        name: the argument's name, in the declaration, the template and the launch.
        dtype: one of `C_TYPES`.
        shape: extents; a string names a symbol that must agree between all arguments of a launch.
        writes: the kernel writes this array.
        align: bytes its address must be a multiple of, where that is more than one element's; a power of two. What wide
            loads rely on.
        largest: magnitude above which the results of the rows that read it may be infinite or NaN; never a plausible
            number. Of Q8_0 blocks what 128 times the scale is, of queries what they are times the scale of the scores
            and log2(e).
        reads: the kernel reads what the array holds, too; by default it reads what it does not write.
        between: the least value and the one behind the greatest, for an array of whole numbers that must not hold any:
            indices below the symbol "n" are `(0, "n")`.
        contents: those of drawn cases, for an array that not all make sense in; names of `checking.contents`.
        over: of a tensor that is written: those whose very place it may take, since each block has read its part of
            them before it writes there. All others must lie apart from it.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    writes: bool = False
    align: int = 1
    largest: float = math.inf
    reads: bool | None = None
    between: tuple[int, Dim] | None = None
    contents: tuple[str, ...] = ()
    over: tuple[str, ...] = ()

    @property
    def read(self) -> bool:
        """Whether the kernel reads what the array holds."""
        return not self.writes if self.reads is None else self.reads


@dataclass(frozen=True)
class Scalar:
    """A by-value argument, of a dtype of `C_TYPES`. One that shares its name with a shape symbol is filled in from the
    arrays.

    Attributes:
        between: least and greatest value of drawn cases.
    """

    name: str
    dtype: str
    between: tuple[float, float] = (1, 4)


Arg = Tensor | Scalar


LDS_TYPES = {
    "float": 4,
    "double": 8,
    "signed char": 1,
    "unsigned char": 1,
    "short": 2,
    "unsigned short": 2,
    "int": 4,
    "unsigned": 4,
    "long long": 8,
    "Quad": 16,
    "Chunk": 16,
}
"""C type of an LDS array's elements to their bytes. A `Quad` is four floats, a `Chunk` eight f16, loaded at once."""

LDS_ALIGNMENT = 16
"""Where an LDS array may begin, so that the widest load is legal."""


@dataclass(frozen=True)
class Lds:
    """An LDS array.

    Attributes:
        name: its name in the declaration and the template.
        ctype: C type of its elements, one of `LDS_TYPES`.
        count: how many there are.
        align: bytes its address must be a multiple of, where that is more than one element's; a power of two up to
            `LDS_ALIGNMENT`. What wide loads rely on.
    """

    name: str
    ctype: str
    count: int
    align: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes the array takes, up to where the next may begin."""
        return -(-LDS_TYPES[self.ctype] * self.count // LDS_ALIGNMENT) * LDS_ALIGNMENT
