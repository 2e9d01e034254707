"""One verify-attention call, on the host and on a device of the stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import hipfire_kernels as hk
from hipfire_kernels.dispatch import AttendRequest
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice

ROWS, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 4, 2, 128, 300
Array = np.ndarray[Any, Any]


@dataclass
class Inputs:
    """Queries and caches on the host."""

    q: Array
    k_cache: Array
    v_cache: Array

    @classmethod
    def make(cls, capacity: int = CAPACITY, seed: int = 0) -> Inputs:
        rng = np.random.default_rng(seed)
        caches = (hk.quantize_q8_0(rng.standard_normal((capacity, KV_HEADS, HEAD_DIM), np.float32)) for _ in range(2))
        return cls(rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32), *caches)

    def on(self, device: GpuDevice) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        return tuple(device.to_device(array) for array in (self.q, self.k_cache, self.v_cache))

    def wanted(self, positions: Array) -> Array:
        out: Array = hk.attend(self.q, self.k_cache, self.v_cache, positions, device="host")
        return out


def chain(ctx: int) -> Array:
    """Positions of a block at the end of a context."""
    return np.arange(ctx - ROWS, ctx, dtype=np.int32)


def request(device: GpuDevice, ctx: int, capturing: bool = True, recording: bool = False) -> AttendRequest:
    """For a plan of such a call."""
    return AttendRequest(
        arch=device.arch.name, kv_format="q8_0", head_dim=HEAD_DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, rows=ROWS,
        logical_ctx=ctx, layout="chain", capturing=capturing, recording=recording,
    )  # fmt: skip
