"""What a route's launches need of the device's memory beside the arrays of the call, before anything is allocated."""

from __future__ import annotations

import functools

from hipfire_kernels.dispatch import tuning as tunings
from hipfire_kernels.dispatch.checks import Check, is_int
from hipfire_kernels.dispatch.policy import PARTIALS_ROWS_VARIABLE, Policy
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import Route
from hipfire_kernels.kernels import families
from hipfire_kernels.layout import MAX_SPLITS
from hipfire_kernels.running.attention import VerifyShape, rows_at_once, workspace_shape
from hipfire_kernels.running.draft import draft_workspace_shape

NAME = "workspace bytes"


def check(row: Route, request: AttendRequest, policy: Policy) -> Check:
    """Whether the workspace of a route fits into the device, for a request that meets the route's predicates."""
    unpriced = [name for name in ("capacity", "memory") if not _is_size(getattr(request, name))]
    if unpriced:
        return Check(unpriced[0], getattr(request, unpriced[0]), "a number of 0 or more, or None", False)
    needed = workspace_bytes(row, request, policy.partials_rows)
    return Check(NAME, needed, _required(request.memory), request.memory is None or needed <= request.memory)


@functools.lru_cache(maxsize=64)
def _required(memory: int | None) -> str:
    if memory is None:
        return "the memory of the device, which the request does not state"
    remedy = f"plan for a shorter context or fewer rows, or hold fewer at once ({PARTIALS_ROWS_VARIABLE})"
    return f"at most {memory}, the memory of the device; {remedy}"


def workspace_bytes(row: Route, request: AttendRequest, partials_rows: int) -> int:
    """Bytes of partial records that the launches of a route hold; 0 where it leaves none.

    Args:
        request: one that meets the route's predicates.
        partials_rows: query rows whose records are held at once, by the policy.
    """
    variant = row.variant(request)
    if not variant.family.records:
        return 0
    tuned = tunings.find(families()[row.family], request) or tunings.DEFAULT
    variant = tuned.of(variant) if tuned.values else variant
    sizes = (request.rows, request.n_heads, request.n_kv_heads, request.head_dim, request.capacity)
    shape = VerifyShape(*(size or 0 for size in sizes))
    processors = request.multiprocessors or shape.n_kv_heads * MAX_SPLITS  # unknown: as many splits as there may be
    if row.workload == "draft":
        extents = draft_workspace_shape(variant, processors, shape.rows, shape.n_heads, shape.n_kv_heads, tuned.splits)
    else:
        held = rows_at_once(variant, partials_rows)
        extents = workspace_shape(variant, processors, shape, request.covers, held, tuned.splits)
    return 4 * extents[0] * extents[1] * extents[2] * extents[3]


def _is_size(value: object) -> bool:
    return value is None or (is_int(value) and value >= 0)
