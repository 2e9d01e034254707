"""Cases of the kernels that write Q8_0 blocks into a cache: contents of every kind, at scattered positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Tensor, Variant
from hipfire_kernels.checking import reference, spoil
from hipfire_kernels.checking.parity import Guarded, differs_from_quantize
from hipfire_kernels.layout import kv_cache_shape
from hipfire_kernels.q8_0 import dequantize_q8_0
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices import Device
from hipfire_kernels.testing.case import FuzzCase
from hipfire_kernels.testing.contents import CACHES, QUERIES, Rng

Array = npt.NDArray[Any]

UNTOUCHED = 0xFF
"""What `parity.Guarded` fills bytes with."""


def new_rows(case: FuzzCase, contents: str, rng: Rng) -> Array:
    """float32 [rows, n_kv_heads, head_dim] to be written: what the named blocks decode to, or for `normal` the named
    queries, beyond what Q8_0 can hold too; NaN or infinities in some places of a spoilt case."""
    shape = kv_cache_shape(case.rows, case.n_kv_heads, case.head_dim)
    if contents == "normal":
        rows = QUERIES[case.queries](rng, (case.rows, case.n_kv_heads, case.head_dim))
    else:
        rows = dequantize_q8_0(CACHES[contents](rng, shape))
    made = np.array(rows, np.float32)
    if case.spoilt:
        for _ in range(int(rng.integers(1, 4))):
            spoil.element(rng, made, case.spoilt.split()[1])
    return made


def check_write(case: FuzzCase, variant: Variant, device: Device) -> tuple[float, str]:
    """The error in units of what rounding allows, at most 1 when right, and what is wrong otherwise.

    Blocks must be those of `quantize_q8_0` to the bit, those that it refuses must not read as numbers where there was
    none, and nothing else in or around the caches may change.
    """
    rng = np.random.default_rng(case.seed)
    capacity = case.ctx + case.rows + case.slack
    positions = rng.permutation(capacity)[: case.rows].astype(np.int32)
    tensors = [arg for arg in variant.args if isinstance(arg, Tensor)]
    inputs = [arg.name for arg in tensors if arg.dtype == "f32"]
    rows = {name: new_rows(case, kind, rng) for name, kind in zip(inputs, (case.keys, case.values), strict=False)}
    shape = kv_cache_shape(capacity, case.n_kv_heads, case.head_dim)
    caches = {arg.name: Guarded(device, shape, np.uint8) for arg in tensors if arg.writes}
    launch(
        variant,
        device,
        positions=device.to_device(positions),
        **{name: device.to_device(values.copy()) for name, values in rows.items()},
        **{name: guarded.array for name, guarded in caches.items()},
    )
    error = 0.0
    for (name, values), guarded in zip(rows.items(), caches.values(), strict=True):
        cache = guarded.read()
        error = max(error, reference.check_quantized(values, cache[positions]))
        if not guarded.intact() or not (np.delete(cache, positions, axis=0) == UNTOUCHED).all():
            return error, f"{name} is written outside its positions"
        wrong = np.argwhere(differs_from_quantize(values, cache[positions]))
        if len(wrong):
            row, head, block = (int(i) for i in wrong[0])
            return error, f"{name} differs from quantize_q8_0 at row {row}, KV head {head}, block {block}"
    return error, ""
