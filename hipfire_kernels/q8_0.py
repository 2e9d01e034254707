"""Q8_0 on the host: quantise and dequantise float32 arrays with numpy, in the arithmetic of the KV write kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.errors import InputError
from hipfire_kernels.layout import Q8_BLOCK, Q8_BYTES, Q8_MAX


def quantize_q8_0(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Quantise to Q8_0 blocks: scale = f16(amax / 127), code = round-half-even(x * (127 / amax)).

    Args:
        x: float [..., n], n a multiple of 32, finite, no magnitude above 127 * 65504 (the f16 scale would overflow).

    Returns:
        uint8 [..., n // 32, 34].

    Raises:
        InputError: x is not floating point, its last extent is not a multiple of 32, or it has such a value.
    """
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"quantize_q8_0: x has dtype {x.dtype}; required: a floating-point array")
    if x.ndim == 0 or x.shape[-1] % Q8_BLOCK:
        raise InputError(
            f"quantize_q8_0: x has shape {x.shape}; required: a last extent that is a multiple of {Q8_BLOCK}"
        )
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // Q8_BLOCK, Q8_BLOCK)
    amax = np.max(np.abs(blocks), axis=-1, keepdims=True)
    if not np.all(amax <= np.float32(Q8_MAX)):
        raise InputError(
            f"quantize_q8_0: x holds NaN, infinity or a magnitude above {Q8_MAX:.0f} "
            f"(largest seen: {np.max(amax)}); Q8_0 has no code for it"
        )
    usable = amax > np.float32(1e-36)
    inverse = np.where(usable, np.float32(127) / np.where(usable, amax, np.float32(1)), np.float32(0))
    codes = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    out = np.empty((*blocks.shape[:-1], Q8_BYTES), np.uint8)
    out[..., :2] = (amax / np.float32(127)).astype("<f2").view(np.uint8)
    out[..., 2:] = codes.view(np.uint8)
    return out


def dequantize_q8_0(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Dequantise Q8_0 blocks; exact, since an f16 scale times an 8-bit code fits in float32.

    Args:
        blocks: uint8 [..., n // 32, 34].

    Returns:
        float32 [..., n].

    Raises:
        InputError: wrong dtype or last extent.
    """
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != Q8_BYTES:
        raise InputError(
            f"dequantize_q8_0: blocks have dtype {blocks.dtype} and shape {blocks.shape}; "
            f"required: uint8 [..., n // {Q8_BLOCK}, {Q8_BYTES}]"
        )
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
    return (scales * codes).reshape(*blocks.shape[:-2], blocks.shape[-2] * Q8_BLOCK)


def random_q8_0(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Q8_0 blocks with every code and scales around 0.01: values of standard deviation 0.7.

    Args:
        shape: [..., n // 32, 34].
    """
    blocks = rng.integers(0, 256, shape, np.uint8)
    scales = rng.uniform(0.005, 0.015, blocks.shape[:-1]).astype("<f2")
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks
