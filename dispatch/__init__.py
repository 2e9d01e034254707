"""Which kernel may run a request: predicates, evidence, policy, explanation, and the launch with its own check."""

from __future__ import annotations

from .admission import Decision, admit
from .calls import attend, draft_attend, kv_write
from .checks import Check
from .counters import snapshot as route_counts
from .graph import VerifyGraph, graph_key
from .planning import Plan, plan
from .record import Evidence
from .request import AttendRequest
from .routes import ROUTES, Route

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
