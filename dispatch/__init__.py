"""Which kernel may run a request: predicates, evidence, policy, explanation, and the launch with its own check."""

from __future__ import annotations

from hipfire_kernels.dispatch.admission import Decision, admit
from hipfire_kernels.dispatch.calls import attend, draft_attend, kv_write
from hipfire_kernels.dispatch.checks import Check
from hipfire_kernels.dispatch.counters import snapshot as route_counts
from hipfire_kernels.dispatch.graph import VerifyGraph, graph_key
from hipfire_kernels.dispatch.planning import Plan, plan
from hipfire_kernels.dispatch.record import Evidence
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import ROUTES, Route

__all__ = [
    "ROUTES",
    "AttendRequest",
    "Check",
    "Decision",
    "Evidence",
    "Plan",
    "Route",
    "VerifyGraph",
    "admit",
    "attend",
    "draft_attend",
    "graph_key",
    "kv_write",
    "plan",
    "route_counts",
]
