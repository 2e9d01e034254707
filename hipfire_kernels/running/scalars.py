"""By-value arguments of a kernel: what a number is packed as, by dtype, and the ends of each."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from hipfire_kernels.bf16 import from_bf16, to_bf16


class _F16(ctypes.Structure):
    """A number as the bits of the nearest float16, which ctypes has not."""

    _fields_ = (("bits", ctypes.c_uint16),)

    def __init__(self, number: float) -> None:
        self.value = number

    @property
    def value(self) -> float:
        """The number, as it was rounded."""
        return float(np.uint16(self.bits).view(np.float16))

    @value.setter
    def value(self, number: float) -> None:
        self.bits = int(np.float16(number).view(np.uint16))


class _BF16(ctypes.Structure):
    """A number as the bits of the nearest bfloat16."""

    _fields_ = (("bits", ctypes.c_uint16),)

    def __init__(self, number: float) -> None:
        self.value = number

    @property
    def value(self) -> float:
        """The number, as it was rounded."""
        return float(from_bf16(np.array(self.bits, np.uint16)))

    @value.setter
    def value(self, number: float) -> None:
        self.bits = int(to_bf16(number))


CTYPES: dict[str, Any] = {
    "f32": ctypes.c_float,
    "f16": _F16,
    "bf16": _BF16,
    "f64": ctypes.c_double,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
}
"""Declared dtype to what ctypes packs a number as. Each is made from a number, and takes another by `value`."""

INTEGERS = {
    name: (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for name, bits in (("i8", 8), ("u8", 8), ("i16", 16), ("i32", 32), ("u32", 32), ("i64", 64))
}
"""The ends of each whole dtype."""


def in_words(dtype: str) -> str:
    """The numbers of a whole dtype: `a 32-bit integer, -2147483648 to 2147483647`."""
    low, high = INTEGERS[dtype]
    article = "an unsigned" if dtype[0] == "u" else "an" if dtype == "i8" else "a"
    return f"{article} {dtype[1:]}-bit integer, {low} to {high}"
