"""Named contents of arrays in drawn cases of any kernel, simplest first.

Each makes an array of a shape and a dtype's name. Of floats those that hold NaN or infinity are among them: where the
exact result is not finite a kernel's must not be, and where it is finite a kernel's must be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.args import Tensor
from hipfire_kernels.bf16 import from_bf16, to_bf16

Rng = np.random.Generator
Array = npt.NDArray[Any]

MAX = {"f16": 65504.0, "bf16": 3.3895314e38, "f32": 3.4028235e38, "f64": 1.7976931348623157e308}
"""Largest finite value of each float dtype."""

TINY = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149, "f64": 5e-324}
"""Least subnormal of each."""

NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}
"""Least normal value of each."""

LARGE = {"f16": 100.0, "bf16": 1e4, "f32": 1e4, "f64": 1e4}
"""What normal values are multiplied by to be large: their squares still have sums, but for f16, whose products overflow
unless they are widened first."""


def _normal(rng: Rng, shape: tuple[int, ...], dtype: str) -> npt.NDArray[np.float64]:
    return rng.standard_normal(shape)


def _scaled(rng: Rng, shape: tuple[int, ...], dtype: str) -> npt.NDArray[np.float64]:
    """Each row a magnitude of its own, from 1e-3 to 1e3."""
    rows = 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    return np.asarray(rng.standard_normal(shape) * rows, np.float64)


def _subnormal(rng: Rng, shape: tuple[int, ...], dtype: str) -> npt.NDArray[np.float64]:
    return np.asarray(rng.integers(-7, 8, shape) * TINY[dtype], np.float64)


def _spiked(value: float) -> Callable[[Rng, tuple[int, ...], str], npt.NDArray[np.float64]]:
    """Normal values, and this one at a few places, of both signs where it has them."""

    def make(rng: Rng, shape: tuple[int, ...], dtype: str) -> npt.NDArray[np.float64]:
        values = rng.standard_normal(shape).reshape(-1)
        at = rng.integers(0, max(1, values.size), min(values.size, 3))
        values[at] = value * rng.choice([-1.0, 1.0], at.size)
        return values.reshape(shape)

    return make


FLOATS: Mapping[str, Callable[[Rng, tuple[int, ...], str], npt.NDArray[np.float64]]] = {
    "normal": _normal,
    "zeros": lambda rng, shape, dtype: np.zeros(shape),
    "ones": lambda rng, shape, dtype: np.ones(shape),
    "scaled": _scaled,
    "large": lambda rng, shape, dtype: rng.standard_normal(shape) * LARGE[dtype],
    "subnormal": _subnormal,
    "nan": _spiked(math.nan),
    "inf": _spiked(math.inf),
}
"""Contents of float arrays. `foreign`, bytes of no writer, is there for every dtype."""

INTEGERS = ("range", "edges")
"""Contents of arrays of whole numbers: any within what the declaration allows; its two ends alone."""


def names(arg: Tensor) -> tuple[str, ...]:
    """The contents that an array may be drawn with."""
    if arg.contents:
        return arg.contents
    if arg.dtype in MAX:
        return (*FLOATS, "foreign")
    return INTEGERS if arg.between is not None else (*INTEGERS, "foreign")


def fill(arg: Tensor, name: str, rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any], top: int) -> Array:
    """An array with named contents.

    Args:
        dtype: numpy's for the argument.
        top: of an array of whole numbers with `between`: the value behind the greatest, its symbol resolved.
    """
    if name == "foreign":
        raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
        if arg.dtype not in MAX or math.isinf(arg.largest):
            return raw
        limit = min(MAX[arg.dtype], arg.largest)
        return to_bf16(_within(from_bf16(raw), limit)) if arg.dtype == "bf16" else _within(raw, limit)
    if arg.dtype in MAX:
        values = _within(FLOATS[name](rng, shape, arg.dtype), min(MAX[arg.dtype], arg.largest))
        return to_bf16(values) if arg.dtype == "bf16" else values.astype(dtype)
    low, high = (arg.between[0], top) if arg.between is not None else _span(dtype)
    ends = np.array([low, max(low, high - 1)])
    drawn = rng.choice(ends, shape) if name == "edges" else rng.integers(low, max(low + 1, high), shape)
    return drawn.astype(dtype)


def _within(values: Array, largest: float) -> Array:
    """Finite values cut at the largest magnitude that the declaration allows; NaN and the infinities stay."""
    if math.isinf(largest):
        return values
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(values.dtype)


def _span(dtype: np.dtype[Any]) -> tuple[int, int]:
    """A span of a whole dtype: all of 8 bits, else what products of a few still fit."""
    info = np.iinfo(dtype)
    return (int(info.min), int(info.max) + 1) if dtype.itemsize == 1 else (max(int(info.min), -100), 101)
