"""MQ4G256 on the host: 4-bit weights in groups of 256, rotated before they are quantised.

A group is 136 bytes: float32 scale, float32 zero, 128 bytes of codes, the even index in the low four bits. Its
values are y = scale * code + zero, and y = s2 * H(s1 * w) / 16, where H is the Walsh-Hadamard transform of 256
and s1, s2 are fixed signs. The rotation is orthonormal: it spreads an outlier over its group, and an error keeps
its length. With codes at most half a step off, the error of a group of weights has a length of at most 8 scales
(16 * scale / 2), so a root mean square of at most scale / 2. For normal weights it is about 0.11 of theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.errors import InputError
from hipfire_kernels.model.layers import Array

GROUP = 256
GROUP_BYTES = 136
_HEADER = 8
_TOP = 15

# A megabyte of float32: a group passes through the transform many times, and this stays in a second-level cache.
_CHUNK = 1024


def _signs(seed: int) -> Array:
    """float32 [256, 1] of 1 and -1: bit 16 of a linear congruential generator that starts at `seed`."""
    state, values = seed, []
    for _ in range(GROUP):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        values.append(1.0 if state >> 16 & 1 else -1.0)
    return np.array(values, np.float32)[:, None]


_FIRST, _SECOND = _signs(42), _signs(1042)


def rotate(w: Array) -> Array:
    """s2 * H(s1 * w) / 16 of each group, float32 [groups, 256]."""
    return _transform(w, _FIRST, _SECOND)


def unrotate(y: Array) -> Array:
    """The inverse of `rotate`: s1 * H(s2 * y) / 16, float32 [groups, 256]."""
    return _transform(y, _SECOND, _FIRST)


def _transform(x: Array, before: Array, after: Array) -> Array:
    # Groups along the last axis, so that each step of the butterflies is one long vector operation.
    t: Array = np.multiply(x.T, before, order="C")
    for stride in (1, 2, 4, 8, 16, 32, 64, 128):
        pairs = t.reshape(GROUP // (2 * stride), 2, stride, -1)
        upper, lower = pairs[:, 0], pairs[:, 1]
        difference = upper - lower
        upper += lower
        lower[...] = difference
    t *= after / np.float32(16)
    out: Array = t.T
    return out


def quantize_mq4g256(x: NDArray[Any]) -> NDArray[np.uint8]:
    """Quantise to MQ4G256: per group zero = min, scale = (max - min) / 15, code = round((y - zero) / scale).

    Args:
        x: float [..., n], n a multiple of 256, finite; read as float32.

    Returns:
        uint8 [..., n // 256, 136].

    Raises:
        InputError: x is not floating point, its last extent is not a multiple of 256, or a value is not finite or
            so large that its group overflows.
    """
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"quantize_mq4g256: x has dtype {x.dtype}; required: a floating-point array")
    if x.ndim == 0 or x.shape[-1] % GROUP:
        raise InputError(
            f"quantize_mq4g256: x has shape {x.shape}; required: a last extent that is a multiple of {GROUP}"
        )
    groups = x.astype(np.float32, copy=False).reshape(-1, GROUP)
    out = np.empty((len(groups), GROUP_BYTES), np.uint8)
    for begin in range(0, len(groups), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        _quantize(groups[part], out[part])
    return out.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP_BYTES)


def _quantize(groups: Array, out: NDArray[np.uint8]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        y = rotate(groups)
        zero = y.min(axis=1, keepdims=True)
        span = y.max(axis=1, keepdims=True) - zero
    if not np.isfinite(span).all():
        raise InputError("quantize_mq4g256: x holds NaN, infinity or a value whose group overflows float32")
    step = span / np.float32(_TOP)
    scale = np.where(step > 0, step, np.float32(1))  # equal values, or a step below the least float32
    codes = np.minimum(np.rint((y - zero) / scale), _TOP).astype(np.uint8)
    out[:, :_HEADER] = np.hstack([scale, zero]).astype("<f4").view(np.uint8)
    out[:, _HEADER:] = codes[:, ::2] | codes[:, 1::2] << 4


def dequantize_mq4g256(blocks: NDArray[np.uint8]) -> Array:
    """Dequantise MQ4G256 groups and undo the rotation. A scale or zero that is not finite gives a NaN or infinity.

    Args:
        blocks: uint8 [..., n // 256, 136].

    Returns:
        float32 [..., n].

    Raises:
        InputError: wrong dtype or last extent.
    """
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != GROUP_BYTES:
        raise InputError(
            f"dequantize_mq4g256: blocks have dtype {blocks.dtype} and shape {blocks.shape}; "
            f"required: uint8 [..., n // {GROUP}, {GROUP_BYTES}]"
        )
    groups = blocks.reshape(-1, GROUP_BYTES)
    out = np.empty((len(groups), GROUP), np.float32)
    for begin in range(0, len(groups), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        out[part] = _dequantize(groups[part])
    return out.reshape(*blocks.shape[:-2], blocks.shape[-2] * GROUP)


def _dequantize(groups: NDArray[np.uint8]) -> Array:
    header = np.ascontiguousarray(groups[:, :_HEADER]).view("<f4").astype(np.float32)
    packed = groups[:, _HEADER:]
    y = np.empty((len(groups), GROUP), np.float32)
    y[:, ::2], y[:, 1::2] = packed & _TOP, packed >> 4
    with np.errstate(over="ignore", invalid="ignore"):
        y *= header[:, :1]
        y += header[:, 1:]
        return unrotate(y)
