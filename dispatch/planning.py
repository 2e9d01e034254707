"""A decided request, ready to run: kernels built and loaded, workspace allocated, arguments packed.

The plan is also the launcher: it checks again, from the device and the arrays, whether the admitted route can run, and
shares no code for that with the predicates of the table. When the two disagree the call runs the established route,
once, and the disagreement is counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hipfire_kernels.dispatch import counters, evidence, policy
from hipfire_kernels.dispatch.admission import Decision, admit
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import route as route_named
from hipfire_kernels.errors import InputError, NotAdmitted
from hipfire_kernels.running import devices
from hipfire_kernels.running.arguments import whole
from hipfire_kernels.running.attention import (
    VerifyPlan,
    VerifyShape,
    check_heads,
    context,
    rows_at_once,
    verify_plan,
)
from hipfire_kernels.running.devices.protocol import Device, OfThisProcess


def plan(
    request: AttendRequest,
    device: Device | str,
    *,
    capacity: int | None = None,
    route: str = "auto",
    block_cols: int = 0,
) -> Plan:
    """Decide a verify request and prepare it.

    Args:
        request: `logical_ctx` is the longest context the plan will run at.
        device: where it will run, or its name; its arch must be the request's.
        capacity: positions of the KV cache; the request's by default, or its `logical_ctx`.
        route: "auto", or a route to insist on.
        block_cols: columns of the tree bias, for a request with layout "tree".

    Raises:
        NotAdmitted: no route may run it; the message lists the failing checks.
        InputError: the request is not for this device, or not a verify request.
    """
    if request.workload == "draft":
        raise InputError("the request's workload is 'draft'; a plan is for 'verify', draft_attend needs none")
    on = devices.resolve(device)
    if capacity is not None:
        capacity = whole("capacity", capacity, 0, legal="positions of the cache, 0 or more")
    capacity = capacity or request.capacity or request.logical_ctx
    request = replace(request, capacity=capacity, multiprocessors=on.multiprocessors, memory=on.memory_bytes)
    decision = decide(request, route)
    if decision.request.arch is None or decision.request.arch.split(":")[0] != on.arch.name:
        raise InputError(f"the request is for {request.arch}, {on.name} is {on.arch.name}")
    sizes = [request.rows, request.n_heads, request.n_kv_heads, request.head_dim, capacity]
    shape = VerifyShape(*(int(size or 0) for size in sizes))
    check_heads(shape.rows, shape.n_heads, shape.n_kv_heads, shape.head_dim)
    if shape.capacity < int(request.logical_ctx or 0):
        raise InputError(
            f"capacity is {shape.capacity}; required: at least the request's logical_ctx {request.logical_ctx}"
        )
    columns = whole("block_cols", block_cols, 0, shape.capacity, f"0 .. {shape.capacity}, the capacity of the cache")
    if (columns > 0) != (request.layout == "tree"):
        raise InputError(f"block_cols is {columns} with layout {request.layout!r}; required: above 0 for a tree alone")
    # What a captured launch computes must stay right as the context grows: it covers the whole cache.
    fixed = request.capturing or request.recording
    return Plan(decision, on, shape, shape.capacity if fixed else int(request.logical_ctx or 0), columns)


def decide(request: AttendRequest, route: str) -> Decision:
    """Admit a request and count the outcome, or raise NotAdmitted with every reason."""
    try:
        decision = admit(request, route_name=route)
    except NotAdmitted as refusal:
        counters.count_decision(refusal.decision)
        raise
    counters.count_decision(decision)
    if decision.route is None:
        raise NotAdmitted(f"no route may run this request\n{decision.explain()}", decision)
    return decision


class Plan(OfThisProcess):
    """One prepared route. It has one workspace: it is for one stream, and one thread, at a time; a second thread is
    refused.

    Attributes:
        decision: which route, why, and why no other.
        device: where it runs.
        shape: of every call.
        max_ctx: the longest context it covers.
    """

    send_instead = "send its `decision.request`, and call hipfire_kernels.plan there"

    def __init__(
        self, decision: Decision, device: Device, shape: VerifyShape, max_ctx: int, block_cols: int = 0
    ) -> None:
        self.decision, self.device, self.shape, self.max_ctx = decision, device, shape, max_ctx
        self._block_cols = block_cols
        self._fixed = bool(decision.request.capturing or decision.request.recording)
        self._partials_rows = policy.current().partials_rows
        self._prepared: dict[str, VerifyPlan] = {}
        self._tiles(str(decision.route))

    def __repr__(self) -> str:
        s = self.shape
        return (
            f"<Plan {self.decision.route} on {self.device.name}: {s.rows} rows, {s.n_heads}/{s.n_kv_heads} heads of "
            f"{s.head_dim}, up to {self.max_ctx} of {s.capacity} keys, {self.workspace_bytes:,} bytes>"
        )

    @property
    def workspace_bytes(self) -> int:
        """Device memory the plan holds."""
        return sum(prepared.workspace_bytes for prepared in self._prepared.values())

    def run(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        positions: Any,
        out: Any,
        *,
        stream: Any = None,
        ctx: int | None = None,
        scale: float | None = None,
        tree_bias: Any = None,
    ) -> str:
        """Launch on arrays of the planned shapes; the name of the route that ran.

        Args:
            positions: int32 [rows]. In host memory they are checked; on a GPU they are taken as they are, and a row
                that sees more than the plan covers comes out as NaN.
            out: float32, the shape of q; written. It lies apart from the others, or is the very array q.
            ctx: keys the longest row sees; what the positions say, or the plan covers, when None.
            tree_bias: for a request with layout "tree".

        Raises:
            InputError: an argument is not what was planned for, another thread runs the plan, or a graph is being
                captured and the plan's launches would not stay right as the context grows; nothing was launched.
        """
        if not self._fixed and self.device.capturing:
            raise InputError(
                f"{self.device.name} is capturing a graph, and this plan's request has capturing="
                f"{self.decision.request.capturing}: its launches follow the live context. Plan it with capturing=True"
            )
        known: npt.NDArray[Any] | None = None
        if isinstance(positions, np.ndarray):
            known = positions
            most = (
                self.max_ctx
                if ctx is None
                else whole("ctx", ctx, 0, self.max_ctx, f"0 .. {self.max_ctx}, what the plan covers")
            )
            seen = context(positions, self.shape, self._block_cols, most)
            if ctx is None and not self._fixed:
                ctx = seen
            positions = self.device.to_device(positions)
        name = self._checked(known)
        self._tiles(name).run(
            q,
            k_cache,
            v_cache,
            positions,
            out,
            ctx=ctx,
            scale=scale,
            tree_bias=tree_bias,
            window=self.decision.request.window or 0,
            stream=stream,
        )
        counters.count_route(name)
        return name

    def _tiles(self, name: str) -> VerifyPlan:
        if name not in self._prepared:
            tuned = self.decision.tuning_of(name)
            variant = tuned.of(route_named(name).variant(self.decision.request))
            self._prepared[name] = verify_plan(
                variant,
                self.device,
                self.shape,
                self.max_ctx,
                block_cols=self._block_cols,
                partials_rows=rows_at_once(variant, self._partials_rows),
                splits=tuned.splits,
            )
        return self._prepared[name]

    def _checked(self, positions: npt.NDArray[Any] | None) -> str:
        """The route to launch: the admitted one, or the established one if the launcher refuses it."""
        name = str(self.decision.route)
        if name.startswith("rows"):
            reason = _multirow_refusal(int(name[4:]), self.device, self.shape, positions, self._fixed)
        elif name.startswith("verify_"):
            reason = _verify_refusal(name, self.device, self.shape)
        elif name == "wmma_prefill":
            reason = _prefill_refusal(self.device, self.shape)
        else:
            reason = None
        if reason is None:
            return name
        if self.decision.fallback is None:
            raise NotAdmitted(f"the launcher refuses {name} ({reason}) and no established route may run", self.decision)
        counters.count_drift(name, reason, self.decision.fallback)
        return self.decision.fallback


def _multirow_refusal(
    group: int, device: Device, shape: VerifyShape, positions: npt.NDArray[Any] | None, captured: bool
) -> str | None:
    """Why the multi-row launcher will not run on these arrays, or None."""
    if not _proven(f"rows{group}", device, shape.head_dim):
        return f"no evidence for {device.arch.name} holds"
    if captured:
        return "its grid follows the live context, which a captured launch cannot"
    if shape.head_dim not in (128, 256):
        return f"head_dim {shape.head_dim} has no multi-row kernel"
    if not group <= shape.rows <= 32:
        return f"{shape.rows} rows are not {group} .. 32"
    if positions is not None and bool((positions[1:] != positions[:-1] + 1).any()):
        return "the positions are not consecutive"
    return None


def _prefill_refusal(device: Device, shape: VerifyShape) -> str | None:
    """Why the prefill launcher will not run on these arrays, or None. What rows see it reads on the device."""
    if not _proven("wmma_prefill", device, shape.head_dim):
        return f"no evidence for {device.arch.name} holds"
    if shape.head_dim not in (128, 256):
        return f"head_dim {shape.head_dim} has no prefill kernel"
    return None


def draft_refusal(route: str, device: Device, head_dim: int) -> str | None:
    """Why the launcher of a draft route on matrix units will not run, or None."""
    legal = {"dflash_n64": (128,), "dflash_m32": (64, 128), "dflash_m16": (64, 128, 256)}
    if route not in legal:
        return None
    if not _proven(route, device, head_dim):
        return f"no evidence for {device.arch.name} holds"
    if head_dim not in legal[route]:
        return f"head_dim {head_dim} has no kernel of its own"
    return None


def _verify_refusal(name: str, device: Device, shape: VerifyShape) -> str | None:
    """Why a split verify launcher will not run on these arrays, or None. What rows see it reads on the device."""
    group, rest = divmod(shape.n_heads, shape.n_kv_heads)
    if not _proven(name, device, shape.head_dim, group):
        return f"no evidence for {device.arch.name} holds"
    if shape.head_dim not in (128, 256):
        return f"head_dim {shape.head_dim} has no split verify kernel"
    if rest or not 1 <= group <= 8:
        return f"{shape.n_heads} heads on {shape.n_kv_heads} KV heads are not 1 .. 8 for each"
    if not 1 <= shape.rows <= 32:
        return f"{shape.rows} rows are not 1 .. 32"
    return None


def _proven(route: str, device: Device, head_dim: int, group: int = 0) -> bool:
    record = evidence.find(device.arch.name, route, head_dim, group)
    return record is not None and record.verdict.admitted and evidence.status(record) != "stale"
