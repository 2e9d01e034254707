"""admit(request) -> Decision: which route may run, and why each other one may not. Pure: it launches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hipfire_kernels.dispatch import evidence as evidence_records
from hipfire_kernels.dispatch import policy as policies
from hipfire_kernels.dispatch import tuning as tunings
from hipfire_kernels.dispatch import workspace
from hipfire_kernels.dispatch.checks import Check, Predicate
from hipfire_kernels.dispatch.record import Evidence, Speed
from hipfire_kernels.dispatch.request import AttendRequest
from hipfire_kernels.dispatch.routes import Route, route, routes_of
from hipfire_kernels.errors import NotAdmitted
from hipfire_kernels.kernels import families


@dataclass(frozen=True)
class Decision:
    """The answer to a request.

    Attributes:
        request: what was asked.
        route: the route that runs; None when nothing may.
        fallback: the route that takes over when the launcher refuses `route`; None when there is no other.
        evidence: the record that opened `route`, where it needs one.
        checks: every predicate of every route that was considered, by route name.
        speed: of each admitted route that has evidence, the timing nearest to the request.
        tuning: what `route` takes of its family's free choices; None where there are none.
    """

    request: AttendRequest
    route: str | None
    fallback: str | None
    evidence: Evidence | None
    checks: dict[str, tuple[Check, ...]]
    speed: dict[str, Speed] = field(default_factory=dict)
    tuning: tunings.Choice | None = None

    def __repr__(self) -> str:
        r = self.request
        shape = f"{r.workload} of {r.rows} rows, {r.n_heads}/{r.n_kv_heads} heads of {r.head_dim}, {r.logical_ctx} keys"
        passed_over = ", ".join(self.rejected) or "none"
        return f"<Decision {self.route or 'no route'} on {r.arch} for {shape}; passed over: {passed_over}>"

    @property
    def rejected(self) -> dict[str, list[Check]]:
        """For each route that may not run, the checks that failed."""
        return {name: failed for name, found in self.checks.items() if (failed := failing(found))}

    def tuning_of(self, route: str | None) -> tunings.Choice:
        """What a launch of a route takes of its family's free choices: all defaults, for another than `self.route`."""
        return self.tuning if self.tuning and route == self.route else tunings.DEFAULT

    def explain(self) -> str:
        """The decision in words, a line a reason."""
        lines = [f"route: {self.route or 'none, nothing may run'}"]
        if self.evidence:
            lines.append(f"  on {self.evidence.kind} evidence: {self.evidence.source}")
        if self.tuning:
            lines.append(f"  {self.tuning.why}")
        if self.fallback:
            lines.append(f"  falls back to: {self.fallback}")
        lines += [f"  {check}" for check in self.checks.get(str(self.route), ()) if check.name == workspace.NAME]
        if self.speed:
            lines.append(f"  measured over {ESTABLISHED}: {', '.join(map(_measured, self.speed.items()))}")
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
            "speed": {name: asdict(speed) for name, speed in self.speed.items()},
            "tuning": asdict(self.tuning) if self.tuning else None,
            "checks": {name: [vars(c) for c in found] for name, found in self.checks.items()},
        }


def failing(checks: Iterable[Check]) -> list[Check]:
    """Those that do not hold."""
    return [check for check in checks if not check.ok]


def admit(request: AttendRequest, *, route_name: str = "auto") -> Decision:
    """Decide how a request runs.

    Args:
        route_name: "auto" for the admitted route that was measured as the fastest, or a route to insist on.

    Raises:
        NotAdmitted: the route insisted on is not admitted; the message has all its failing checks.
        InputError: no route has that name, or an environment switch does not parse.
    """
    policy = policies.current()
    wanted = None if route_name == "auto" else route(route_name)
    considered = routes_of(request.workload)
    if wanted is not None and wanted not in considered:
        considered = (wanted, *considered)
    seen: dict[Predicate, Check] = {}
    sought = (request.head_dim, request.group)
    records = {r.name: evidence_records.find(request.arch, r.name, *sought) for r in considered if r.needs_evidence}
    found = {
        row.name: _evaluate(row, request, policy, records.get(row.name), row is wanted, seen) for row in considered
    }
    admitted = [row for row in considered if not failing(found[row.name])]
    if wanted is not None and wanted not in admitted:
        reasons = "\n".join(f"  {check}" for check in failing(found[wanted.name]))
        decision = Decision(request, None, None, None, found)
        raise NotAdmitted(f"route {wanted.name} is not admitted for this request:\n{reasons}", decision)
    if not admitted:
        return Decision(request, None, None, None, found)
    nearest = {
        row.name: r.nearest(request.rows or 0, request.logical_ctx or 0)
        for row in admitted
        if (r := records.get(row.name))
    }
    speed = {name: timing for name, timing in nearest.items() if timing is not None}
    chosen = wanted or max(admitted, key=lambda row: speed[row.name].ratio if row.name in speed else 1.0)
    established = next((row for row in reversed(admitted) if not row.needs_evidence), None)
    return Decision(
        request,
        chosen.name,
        established.name if established and established is not chosen else None,
        records.get(chosen.name),
        found,
        speed,
        tunings.find(families()[chosen.family], request),
    )


ESTABLISHED = "the established route"


def _measured(item: tuple[str, Speed]) -> str:
    name, speed = item
    rows = "" if speed.rows is None else f"{speed.rows} rows, "
    return f"{name} {speed.ratio:.2f}x at {rows}{speed.ctx} keys"


def _evaluate(
    row: Route,
    request: AttendRequest,
    policy: policies.Policy,
    record: Evidence | None,
    insisted: bool,
    seen: dict[Predicate, Check],
) -> tuple[Check, ...]:
    """Every check of a route. `seen` has what predicates shared with other routes have found."""
    for predicate in row.predicates:
        if predicate not in seen:
            seen[predicate] = predicate(request)
    found = [seen[predicate] for predicate in row.predicates]
    if row.needs_evidence:
        opens = evidence_records.check(record, row.name, policy.evidence)
        found.append(opens)
        record = record if opens.ok else None
    crossover = record.crossover.ctx if record and record.crossover else None
    found += row.policy_checks(request, policy, crossover)
    if not insisted:
        found += row.auto_checks(request, policy)
    if not failing(found):  # what it takes is known for what it can run alone
        found.append(workspace.check(row, request, policy))
    return tuple(found)
