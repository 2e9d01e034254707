"""bfloat16 in numpy, which has no such type: its bits, as uint16. They are the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 of each number, ties to even; NaN stays NaN.

    Args:
        x: numbers of any shape. Each is rounded once: a float64 that lies between two float32 too.

    Returns:
        The bits, uint16 [shape of x].
    """
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.asarray(x, np.float64)
        near = exact.astype(np.float32)
    bits = near.view(np.uint32).astype(np.int64)
    # To odd first: what float32 drops must not become, or break, a tie.
    bits = (bits - (np.abs(near) > np.abs(exact))) | (near != exact)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    sign = np.where(np.signbit(exact), 0x8000, 0)
    return np.where(np.isnan(exact), sign | 0x7FC0, bits).astype(np.uint16)


def from_bf16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The numbers of bfloat16 bits, exactly.

    Args:
        bits: uint16, or a dtype of two bytes that somebody registered as bfloat16; any shape.

    Returns:
        float32 [shape of bits].
    """
    halves = np.zeros((*bits.shape, 2), "<u2")  # copied, for a shift would need the memory twice
    halves[..., 1] = np.ascontiguousarray(bits).view("<u2")
    return halves.view("<f4")[..., 0]
