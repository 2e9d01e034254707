"""The check of the split kernels: what each split has left in its record, beside what the reducer makes of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import row_errors
from hipfire_kernels.checking.parity import Case, Guarded, Result, compare, excused_rows, expected, inputs, run_attend
from hipfire_kernels.running.devices.protocol import Device

Array = npt.NDArray[Any]

LOWEST = float(np.finfo(np.float32).min)
"""The maximum in a record of no key."""


def check_split(variant: Variant, case: Case, device: Device) -> Result:
    """Records and output against the oracle; the error is the larger one, in units that `stretch` lengthens.

    Of the rows that went in the last launch: every split has written its maximum and sum, and the records, merged in
    float64, give what the oracle gives. Which key belongs to which split is the kernel's affair. The records of a row
    that has no exact result, or need not be finite, may hold anything that does not merge to a number.
    """
    i = inputs(case)
    before = hash((i.q.tobytes(), i.k_cache.tobytes(), i.v_cache.tobytes(), i.positions.tobytes()))
    got, guarded = run_attend(variant, case, device)
    changed = hash((i.q.tobytes(), i.k_cache.tobytes(), i.v_cache.tobytes(), i.positions.tobytes())) != before
    want, unit = expected(case), stretch(case) if variant.tolerance.grows else np.ones(got.shape[:2])
    let = excused_rows(variant, case)
    unit = np.where(let, 1.0, unit)  # beyond the range there is nothing that grows: right, or no number
    result = compare(variant, case, got, want, guarded, changed=changed, excused=let)
    records = _last_records(guarded[1], case.rows)
    last = slice(case.rows - len(records), None)
    fault = result.fault or _fault_of(records, np.isfinite(want[last]).all(axis=-1) & ~let[last])
    error = math.inf
    if not fault:
        merged = reference.merge(records, np.full(len(records), records.shape[2]))
        error = max(_worst(got, want, let, unit), _worst(merged, want[last], let[last], unit[last]))
    limit = variant.tolerance.limit(math.ceil(case.ctx / records.shape[2]))
    return dataclasses.replace(result, error=error, fault=fault, limit=limit)


def _last_records(partials: Guarded, rows: int) -> Array:
    """The records of the last launch: of what does not fill the workspace, or of as many rows as it holds."""
    records = partials.read()
    return records[: (rows - 1) % len(records) + 1]


def _fault_of(records: Array, finite: Array) -> str:
    """What is wrong with a record of the rows that are `finite` [rows, heads]; empty when there is nothing."""
    top, total = records[..., 0], records[..., 1]
    wrong = {
        "a maximum that is not finite or below that of no key": ~(np.isfinite(top) & (top >= LOWEST)),
        "a sum that is not finite or negative": ~(np.isfinite(total) & (total >= 0)),
        "the sum of no key, but not its maximum": (total == 0) & (top != LOWEST),
        "a sum, but the maximum of no key": (total > 0) & (top == LOWEST),
    }
    for fault, where in wrong.items():
        where = where & finite[..., None]
        if where.any():
            row, head, split = np.argwhere(where)[0]
            return f"the record of row {row}, head {head}, split {split} of the last launch has {fault}"
    return ""


def _worst(got: Array, want: Array, excused: Array, unit: Array) -> float:
    return float((row_errors(got, want, excused) / unit).max(initial=0.0))


@functools.lru_cache(maxsize=8)
def stretch(case: Case) -> Array:
    """How many times the error of standard normal inputs a kernel with rounded queries may make, by row and head.

    A score is scale * sum_d q_d k_d. With a relative error u in each q_d (2^-11 for one f16 term, 2^-22 for two) it is
    off by at most u * scale * sum_d |q_d k_d| (the bound of an inner product with perturbed factors: Higham, Accuracy
    and Stability of Numerical Algorithms, 2nd ed., section 3.1), and, to first order, every weight by as much of
    itself. Standard normal queries and keys at the usual scale have sums of 2 / pi * sqrt(head_dim). The tolerance is
    for sums up to sqrt(head_dim); for a row whose largest sum over its keys is n times that, it is n times as much.

    Returns:
        float64 [rows, n_heads], at least 1.
    """
    i = inputs(case)
    keys = np.nan_to_num(abs(reference.decode_cache(i.k_cache)), posinf=0.0)
    queries = np.nan_to_num(abs(i.q.astype(np.float64)), posinf=0.0)
    found = np.ones(i.q.shape[:2])
    for head in range(case.n_heads):
        kv_head = head * case.n_kv_heads // case.n_heads
        for row, position in enumerate(i.positions):
            sums = keys[: position + 1, kv_head] @ queries[row, head] / math.sqrt(case.head_dim)
            found[row, head] = max(1.0, sums.max(initial=0.0) / math.sqrt(case.head_dim))
    return found
