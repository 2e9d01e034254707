"""What no case of the parity grid asks of a split verify kernel. Each check says what is wrong, or nothing."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import row_errors
from hipfire_kernels.checking.parity import Case, inputs, run_attend
from hipfire_kernels.q8_0 import quantize_q8_0
from hipfire_kernels.running.attention import check_verify, verify_plan
from hipfire_kernels.running.devices.protocol import Device

Array = npt.NDArray[Any]


def rows_of_no_chain(variant: Variant, device: Device) -> str:
    """Each row has a bound of its own; two see nothing, one sees all."""
    i = inputs(Case(16, 600, 2 * variant.group, 2, variant.head_dim, seed=3))
    positions = np.array([-1, 599, 0, 63, 64, 127, 128, -1, 300, 301, 191, 192, 5, 599, 400, 17], np.int32)
    out = _run(variant, device, i.q, i.k_cache, i.v_cache, positions, 600)
    return _wrong(variant, out, reference.attend(i.q, i.k_cache, i.v_cache, positions), positions)


def nan_behind_a_bound(variant: Variant, device: Device) -> str:
    """Who sees a key that is NaN, in K and V or in one, has no plausible number; nobody else knows."""
    case = Case(8, 260, 2 * variant.group, 2, variant.head_dim, seed=11)
    clean, _ = run_attend(variant, case, device)
    i = inputs(case)
    for row, names in ((0, "kv"), (3, "v"), (5, "k"), (6, "v")):
        first = int(i.positions[row]) + 1
        caches = [cache for name, cache in (("k", i.k_cache), ("v", i.v_cache)) if name in names]
        kept = [cache[first:].copy() for cache in caches]
        for cache in caches:
            cache[first:, ..., :2] = 0x7E
        try:
            spoilt, _ = run_attend(variant, case, device)
        finally:
            for cache, before in zip(caches, kept, strict=True):
                cache[first:] = before
        if not np.array_equal(spoilt[: row + 1], clean[: row + 1]):
            return f"NaN in {names} behind row {row} is in rows up to it"
        if not np.isnan(spoilt[row + 1 :]).all():
            return f"NaN in {names} behind row {row} is not in all of those that see it"
    return ""


def end_of_memory(variant: Variant, device: Device) -> str:
    """The last byte of each input is the last that can be read; two rows stand behind the cache, and are NaN."""
    i = inputs(Case(6, 130, 2 * variant.group, 2, variant.head_dim, seed=7))
    positions = np.array([0, 63, 126, 129, 130, 4000], np.int32)
    arrays = [fenced(array) for array in (i.q, i.k_cache[:130], i.v_cache[:130])]
    out = _run(variant, device, *arrays, fenced(positions), 130)
    want = reference.attend(i.q[:4], *arrays[1:], positions[:4])
    if not np.isnan(out[4:]).all():
        return "a row that stands behind the cache has a number"
    return _wrong(variant, out[:4], want, positions[:4])


def sink(variant: Variant, device: Device) -> str:
    """One key of weight 1 and thousands of 2^-14.7, which hold a share of the row: f16 has subnormals for them."""
    q, k_cache, v_cache = a_sink(variant.head_dim, dict(variant.params).get("group", 1))
    positions = np.full(len(q), len(k_cache) - 1, np.int32)
    out = _run(variant, device, q, k_cache, v_cache, positions, len(k_cache))
    return _wrong(variant, out, reference.attend(q, k_cache, v_cache, positions), positions)


def a_sink(head_dim: int, heads: int) -> tuple[Array, Array, Array]:
    """Queries of four rows that have a score of 0 with the first of 4,096 keys, of about -10.2 with the others; caches
    of one KV head. V of the first key is -1, of the others about 1."""
    rng = np.random.default_rng(1)
    q = np.zeros((4, heads, head_dim), np.float32)
    q[..., 0] = np.sqrt(head_dim)
    k, v = np.zeros((2, 4096, 1, head_dim), np.float32)
    k[1:, 0, 0] = -10.2
    v[...] = 1 + 0.1 * rng.standard_normal(v.shape)
    v[0] = -1
    return q, quantize_q8_0(k), quantize_q8_0(v)


CHECKS = (rows_of_no_chain, nan_behind_a_bound, end_of_memory, sink)


def fenced(array: Array) -> Array:
    """A copy at the end of a page; the next one cannot be read: a kernel that does ends the process."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flat = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8, array.nbytes, size - array.nbytes)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(flat.ctypes.data + array.nbytes), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat[...] = array.view(np.uint8).ravel()
    return flat.view(array.dtype).reshape(array.shape)


def _run(variant: Variant, device: Device, q: Array, k: Array, v: Array, positions: Array, ctx: int) -> Array:
    out = device.to_device(np.full(q.shape, np.nan, np.float32))
    given = [device.to_device(array) for array in (q, k, v, positions)]
    verify_plan(variant, device, check_verify(device, *given[:3]), ctx).run(*given, out)
    return device.to_host(out)


def _wrong(variant: Variant, out: Array, want: Array, positions: Array) -> str:
    error = row_errors(out, want)
    if error.max() <= variant.tolerance.worst_row:
        return ""
    row, head = np.unravel_index(error.argmax(), error.shape)
    return f"row {row} at position {positions[row]}, head {head} is off by {error[row, head]:.3g}"
