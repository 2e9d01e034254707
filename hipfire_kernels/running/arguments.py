"""By-value arguments: the one place where what a caller passed becomes a number that a kernel can take.

A kernel's numbers are 32 bits wide, and ctypes makes any Python number fit, in silence: 2**32 + 1 becomes 1, 1e39
becomes infinity. So every path (`attend`, `draft_attend`, `plan`, `plan.run`, `launch`) has its numbers from here.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from hipfire_kernels.authoring.args import FLOATS
from hipfire_kernels.errors import InputError

I32_MIN, I32_MAX = -(2**31), 2**31 - 1

F32_END = FLOATS["f32"]


def whole(name: str, value: Any, low: int = I32_MIN, high: int = I32_MAX, legal: str = "a 32-bit integer") -> int:
    """A whole number inside both ends: an int, a numpy integer, whatever else `operator.index` takes; no bool.

    Args:
        legal: the legal values in words, for the message.
    """
    if type(value) is int and low <= value <= high:  # nearly every call: a plan's run has three of them
        return value
    number = None if isinstance(value, bool) else _index(value)
    if number is None:
        raise InputError(f"{name} is {value!r}; required: a whole number, {legal}")
    if not low <= number <= high:
        raise InputError(f"{name} is {number}; required: {legal}")
    return number


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(name: str, value: Any, dtype: str = "f32") -> float:
    """A number that is finite in a float dtype, Python's or numpy's; no bool, no text."""
    end = FLOATS[dtype]
    if type(value) is float and -end < value < end:
        return value
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} is {value!r}; required: a number")
    number = _float(value)
    if not -end < number < end:
        what = f"float{dtype.lstrip('bf')}" if dtype != "bf16" else "bfloat16"
        raise InputError(f"{name} is {number}; required: a finite number of {what}, a magnitude below {end:.8g}")
    return number


def _float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def flag(name: str, value: Any) -> bool:
    """True or False, Python's or numpy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name} is {value!r}; required: True or False")
    return bool(value)


def window_keys(value: Any) -> int:
    """Keys that a row sees; 0 for all."""
    return whole("window", value, 0, legal=f"0 for none, or a number of keys up to {I32_MAX}")
