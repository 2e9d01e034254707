"""The formats in which tensors are stored, one row each: how many bytes they take and how they become float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.bf16 import from_bf16
from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES
from hipfire_kernels.model import mq4
from hipfire_kernels.model.layers import Array
from hipfire_kernels.q8_0 import dequantize_q8_0

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """How values are stored: in groups along the last extent, every group alike.

    Attributes:
        name: as messages and tables have it.
        group: values of a group; 1 where every value stands for itself.
        group_bytes: bytes of a group.
        decode: uint8 [groups, group_bytes] to float32 with as many values, in order.
    """

    name: str
    group: int
    group_bytes: int
    decode: Callable[[Bytes], Array]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the last extent of `shape` is whole groups."""
        return self.group == 1 or (bool(shape) and shape[-1] % self.group == 0)

    def size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor whose shape fits."""
        return math.prod(shape) // self.group * self.group_bytes


def _plain(dtype: str) -> Callable[[Bytes], Array]:
    return lambda raw: raw.view(dtype).astype(np.float32)


def _from_bf16(raw: Bytes) -> Array:
    return from_bf16(raw.view("<u2"))


BF16 = Format("BF16", 1, 2, _from_bf16)
F16 = Format("F16", 1, 2, _plain("<f2"))
F32 = Format("F32", 1, 4, _plain("<f4"))
# Whole numbers, for a draft's vocabulary map: ids are far below the 2^24 up to which float32 has them all.
I64 = Format("I64", 1, 8, _plain("<i8"))
I32 = Format("I32", 1, 4, _plain("<i4"))
BOOL = Format("BOOL", 1, 1, _plain("?"))
Q8F16 = Format("Q8F16", Q8_BLOCK, Q8_BYTES, dequantize_q8_0)
MQ4G256 = Format("MQ4G256", mq4.GROUP, mq4.GROUP_BYTES, mq4.dequantize_mq4g256)


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: its name there, its file, the byte range inside that file, and how to read it."""

    name: str
    file: Path
    format: Format
    shape: tuple[int, ...]
    begin: int
    end: int

    def decode(self, raw: Any) -> Array:
        """The tensor as a new float32 array, C-contiguous.

        Args:
            raw: a buffer of its bytes.

        Raises:
            CheckpointError: a value is not finite.
        """
        stored = np.frombuffer(raw, np.uint8).reshape(-1, self.format.group_bytes)
        with np.errstate(invalid="ignore"):
            values = self.format.decode(stored).reshape(self.shape)
        # Both carry a NaN on, and neither needs memory.
        if not (np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0))):
            index = np.flatnonzero(~np.isfinite(values))[0]
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r} ({self.format.name}) holds {values.flat[index]} at index "
                f"{index}; its values, scales and zeros must be finite"
            )
        return values
