"""One case against the oracle and its invariant: the check that fuzzing, replay, pytest and an engine all run."""

from __future__ import annotations

from typing import Any

from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import parity
from hipfire_kernels.checking.oracle import hold
from hipfire_kernels.checking.result import Finding
from hipfire_kernels.errors import InputError
from hipfire_kernels.kernels.arguments import QUANTIZE
from hipfire_kernels.running.attention import VerifyShape, workspace_shape
from hipfire_kernels.running.devices import device
from hipfire_kernels.running.devices.protocol import Ordered
from hipfire_kernels.testing.case import FuzzCase, is_tree, kind_of, variant_of
from hipfire_kernels.testing.invariants import Given, violated
from hipfire_kernels.testing.requests import AnyRequest, draft_request, verify_request
from hipfire_kernels.testing.subjects import Arrangement, Subject, VariantSubject, least_weight
from hipfire_kernels.testing.writes import check_write
from hipfire_kernels.testing.yardstick import error_of, expected


def request_of(case: FuzzCase) -> AnyRequest:
    """The tensors of a case of an attention variant.

    Raises:
        InputError: the variant is a reducer or a cache write, which no request describes.
    """
    variant = variant_of(case)
    if not kind_of(variant):
        raise InputError(f"{case.variant} is no attention kernel that takes q, K and V; no request describes its input")
    if kind_of(variant) == "draft":
        return draft_request(case, f16=dict(variant.params).get("kv") == "f16")
    return verify_request(case, tree=is_tree(variant))


def check(case: FuzzCase, subject: Subject) -> Finding:
    """Hold a subject against the oracle and against the invariant that the case names.

    Cache writes have a check of their own. A reducer is held by `parity.check_merge`, with the part of the case that
    `parity.Case` can say.

    Raises:
        DeviceError: a launch failed, or was broken off, say by a deadlock.
        InputError: the case does not fit the subject.
    """
    if isinstance(subject, VariantSubject) and not kind_of(subject.variant):
        return _check_other(case, subject)
    request = request_of(case)
    how = Arrangement(case.partials_rows, case.spare_tiles, case.offset, case.stream)
    out, fault = subject.start(request, how).result()
    want = expected(request, subject.tolerance, subject.largest, least_weight(subject))
    error, wrong = error_of(out, want, subject.tolerance)
    fault, limit = fault or wrong, _limit(case, subject)
    if case.invariant and not fault and error <= limit:
        fault = violated(case.invariant, Given(subject, case, request, how, out))
        fault = fault and f"{case.invariant}: {fault}"
    return Finding(case, error, limit, fault)


def _limit(case: FuzzCase, subject: Subject) -> float:
    """The subject's tolerance; for a variant whose one sum takes all keys of a split, with what these add."""
    if not isinstance(subject, VariantSubject) or not subject.variant.tolerance.per_key:
        return subject.tolerance
    heads = case.n_kv_heads * case.group
    shape = VerifyShape(case.rows, heads, case.n_kv_heads, case.head_dim, case.ctx)
    splits = workspace_shape(subject.variant, subject.device.multiprocessors, shape, case.ctx)[2]
    return subject.variant.tolerance.limit(-(-case.ctx // splits))


def _check_other(case: FuzzCase, subject: VariantSubject) -> Finding:
    """A cache write or a reducer. The thread order is held by the error, a float64 that moves with most bits."""
    on = subject.device
    found = [_other(case, subject)]
    if case.invariant == "thread_order" and isinstance(on, Ordered):
        before, on.thread_order = on.thread_order, case.seed
        try:
            found.append(_other(case, subject))
        finally:
            on.thread_order = before
    fault = next((one.fault for one in found if one.fault), "")
    if len({one.error for one in found}) > 1:
        fault = fault or f"thread_order: another result with threads in the order of seed {case.seed}"
    return Finding(case, max(one.error for one in found), found[0].limit, fault)


def _other(case: FuzzCase, subject: VariantSubject) -> Finding:
    if subject.variant.family.oracle == QUANTIZE:
        error, fault = check_write(case, subject.variant, subject.device)
        return Finding(case, error, 1.0, fault)
    found = parity.check_merge(subject.variant, plain(case), subject.device)
    return Finding(case, found.error, found.limit, found.fault)


def plain(case: FuzzCase) -> parity.Case:
    """The part of a case that `parity.Case` can say."""
    named = {"normal": "normal", "zeros": "zeros", "same": "normal"}
    values = "large" if case.queries in ("large", "beyond_f16") else named.get(case.keys, "foreign")
    values = "extreme" if case.queries in ("vast", "largest") else values
    values = "spoilt" if case.spoilt else values
    return parity.Case(
        rows=case.rows,
        ctx=case.ctx,
        n_heads=case.n_heads,
        n_kv_heads=case.n_kv_heads,
        head_dim=case.head_dim,
        values=values,
        window=case.window,
        block_cols=case.rows + case.extra_cols if is_tree(variant_of(case)) else 0,
        seed=case.seed,
    )


def assert_parity(subject: Variant | Subject, case: Any, on: str = "host") -> None:
    """Raise AssertionError, with the finding and the case to replay, unless a case passes.

    Args:
        subject: a variant, run on the device named `on`; or a subject, for instance an `EngineSubject`.
        case: one that the variant's oracle drew.
    """
    if isinstance(subject, Variant):
        found = hold(subject, case, device(on))
    else:
        found = check(case, subject)
    if not found.ok:
        raise AssertionError(f"{subject.name}: {found.line(case.describe())}\nreplay: {case.to_json()}")
