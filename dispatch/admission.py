"""admit(request) -> Decision: which route may run, and why each other one may not. Pure: it launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import NotAdmitted
from . import evidence as evidence_records
from . import policy as policies
from .checks import Check
from .record import Evidence
from .request import AttendRequest
from .routes import Route, route, routes_of


@dataclass(frozen=True)
class Decision:
    """The answer to a request.

    Attributes:
        request: what was asked.
        route: the route that runs; None when nothing may.
        fallback: the route that takes over when the launcher refuses `route`; None when there is no other.
        evidence: the record that opened `route`, where it needs one.
        checks: every predicate of every route that was considered, by route name.
    """

    request: AttendRequest
    route: str | None
    fallback: str | None
    evidence: Evidence | None
    checks: dict[str, tuple[Check, ...]]

    @property
    def rejected(self) -> dict[str, list[Check]]:
        """For each route that may not run, the checks that failed."""
        failed = {name: [c for c in found if not c.ok] for name, found in self.checks.items()}
        return {name: found for name, found in failed.items() if found}

    def explain(self) -> str:
        """The decision in words, a line a reason."""
        lines = [f"route: {self.route or 'none, nothing may run'}"]
        if self.evidence:
            lines.append(f"  on {self.evidence.kind} evidence: {self.evidence.source}")
        if self.fallback:
            lines.append(f"  falls back to: {self.fallback}")
        for name, failed in self.rejected.items():
            lines.append(f"not {name}:")
            lines += [f"  {check}" for check in failed]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "request": self.request.as_dict(),
            "route": self.route,
            "fallback": self.fallback,
            "evidence": self.evidence.as_dict() if self.evidence else None,
            "checks": {name: [vars(c) for c in found] for name, found in self.checks.items()},
        }


def admit(request: AttendRequest, *, route_name: str = "auto") -> Decision:
    """Decide how a request runs.

    Args:
        route_name: "auto" for the first admitted route of the table, or a route to insist on.

    Raises:
        NotAdmitted: the route insisted on is not admitted; the message has all its failing checks.
        InputError: no route has that name, or an environment switch does not parse.
    """
    policy = policies.current()
    wanted = None if route_name == "auto" else route(route_name)
    considered = routes_of(request.workload)
    if wanted is not None and wanted not in considered:
        considered = (wanted, *considered)
    found = {row.name: _evaluate(row, request, policy) for row in considered}
    admitted = [row for row in considered if all(c.ok for c in found[row.name])]
    if wanted is not None and wanted not in admitted:
        failing = "\n".join(f"  {c}" for c in found[wanted.name] if not c.ok)
        decision = Decision(request, None, None, None, found)
        raise NotAdmitted(f"route {wanted.name} is not admitted for this request:\n{failing}", decision)
    chosen = wanted or (admitted[0] if admitted else None)
    if chosen is None:
        return Decision(request, None, None, None, found)
    established = considered[-1] if considered[-1] in admitted else None
    return Decision(
        request,
        chosen.name,
        established.name if established and established is not chosen else None,
        evidence_records.find(request.arch, chosen.name, request.head_dim) if chosen.needs_evidence else None,
        found,
    )


def _evaluate(row: Route, request: AttendRequest, policy: policies.Policy) -> tuple[Check, ...]:
    found = [predicate(request) for predicate in row.predicates]
    record = None
    if row.needs_evidence:
        record = evidence_records.find(request.arch, row.name, request.head_dim)
        opens = evidence_records.check(record, row.name, policy.evidence)
        found.append(opens)
        record = record if opens.ok else None
    return (*found, *row.policy_checks(request, policy, record))
