"""A decided request, ready to run: kernels built and loaded, workspace allocated, arguments packed.

The plan is also the launcher: it checks again, from the device and the arrays, whether the admitted route can run, and
shares no code for that with the predicates of the table. When the two disagree the call runs the established route,
once, and the disagreement is counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..attention import TilePlan, VerifyShape, check_heads, check_positions
from ..errors import InputError, NotAdmitted
from ..runtime import Device
from . import counters, evidence, policy
from .admission import Decision, admit
from .request import AttendRequest
from .routes import route as route_named


def plan(request: AttendRequest, device: Device, *, capacity: int | None = None, route: str = "auto") -> Plan:
    """Decide a verify request and prepare it.

    Args:
        request: `logical_ctx` is the longest context the plan will run at.
        device: where it will run; its arch must be the request's.
        capacity: positions of the KV cache; `logical_ctx` by default.
        route: "auto", or a route to insist on.

    Raises:
        NotAdmitted: no route may run it; the message lists the failing checks.
        InputError: the request is not for this device, or not a verify request.
    """
    if request.workload == "draft":
        raise InputError("the request's workload is 'draft'; a plan is for 'verify', draft_attend needs none")
    decision = decide(request, route)
    if decision.request.arch is None or decision.request.arch.split(":")[0] != device.arch.name:
        raise InputError(f"the request is for {request.arch}, {device.name} is {device.arch.name}")
    sizes = [request.rows, request.n_heads, request.n_kv_heads, request.head_dim, capacity or request.logical_ctx]
    shape = VerifyShape(*(int(size or 0) for size in sizes))
    check_heads(shape.rows, shape.n_heads, shape.n_kv_heads, shape.head_dim)
    if shape.capacity < int(request.logical_ctx or 0):
        raise InputError(
            f"capacity is {shape.capacity}; required: at least the request's logical_ctx {request.logical_ctx}"
        )
    # What a captured launch computes must stay right as the context grows: it covers the whole cache.
    fixed = request.capturing or request.recording
    return Plan(decision, device, shape, shape.capacity if fixed else int(request.logical_ctx or 0))


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


class Plan:
    """One prepared route. It has one workspace: it is for one stream, and one thread, at a time.

    Attributes:
        decision: which route, why, and why no other.
        device: where it runs.
        shape: of every call.
        max_ctx: the longest context it covers.
    """

    def __init__(
        self, decision: Decision, device: Device, shape: VerifyShape, max_ctx: int, block_cols: int = 0
    ) -> None:
        self.decision, self.device, self.shape, self.max_ctx = decision, device, shape, max_ctx
        self._block_cols = block_cols
        self._partials_rows = policy.current().partials_rows
        self._prepared: dict[str, TilePlan] = {}
        self._tiles(str(decision.route))

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
            out: float32, the shape of q; written.
            ctx: keys the longest row sees; what the plan covers when None.
            tree_bias: for a request with layout "tree".

        Raises:
            InputError: an array is not what was planned for, or a graph is being captured and the plan's launches
                would not stay right as the context grows; nothing was launched.
        """
        if self.device.capturing and not self._fixed:
            raise InputError(
                f"{self.device.name} is capturing a graph, and this plan's request has capturing="
                f"{self.decision.request.capturing}: its launches follow the live context. Plan it with capturing=True"
            )
        known: npt.NDArray[Any] | None = None
        if isinstance(positions, np.ndarray):
            known = positions
            seen = check_positions(positions, self.shape.rows, self.shape.capacity)
            if ctx is None and not self._fixed and tree_bias is None:
                ctx = seen
            if seen > (self.max_ctx if ctx is None else ctx):
                raise InputError(f"positions see {seen} keys; the launch covers {self.max_ctx if ctx is None else ctx}")
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

    @property
    def _fixed(self) -> bool:
        return bool(self.decision.request.capturing or self.decision.request.recording)

    def _tiles(self, name: str) -> TilePlan:
        if name not in self._prepared:
            variant = route_named(name).variant(self.decision.request)
            self._prepared[name] = TilePlan(
                variant,
                self.device,
                self.shape,
                self.max_ctx,
                block_cols=self._block_cols,
                partials_rows=self._partials_rows,
            )
        return self._prepared[name]

    def _checked(self, positions: npt.NDArray[Any] | None) -> str:
        """The route to launch: the admitted one, or the established one if the launcher refuses it."""
        name = str(self.decision.route)
        if not name.startswith("rows"):
            return name
        reason = _multirow_refusal(int(name[4:]), self.device, self.shape, positions, self._fixed)
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
    record = evidence.find(device.arch.name, f"rows{group}", shape.head_dim)
    if record is None or not record.verdict.admitted or evidence.status(record) == "stale":
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
