"""What was decided and what ran: routes admitted, passed over and why, launched, fallen through and why."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipfire_kernels.dispatch.admission import Decision

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("admitted", "refused", "routes", "drift")}


def _in_forked_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is gone may have held it


os.register_at_fork(after_in_child=_in_forked_child)


def count_decision(decision: Decision) -> None:
    """A request was decided: one route admitted, unless none was, and the better ones refused."""
    refused = refusals(decision)
    with _lock:
        if decision.route is not None:
            _counts["admitted"][decision.route] += 1
        _counts["refused"].update(refused)


def refusals(decision: Decision) -> list[str]:
    """`route: check` for every check that failed of a route that would have come before the one that runs."""
    names = list(decision.checks)
    before = names if decision.route is None else names[: names.index(decision.route)]
    return [f"{name}: {check.name}" for name in before for check in decision.checks[name] if not check.ok]


def count_route(name: str) -> None:
    """One call ran this route."""
    with _lock:
        _counts["routes"][name] += 1


def count_drift(route: str, reason: str, established: str) -> None:
    """The launcher refused an admitted route. Logged the first time for each route and reason."""
    key = f"{route}: {reason}"
    with _lock:
        _counts["drift"][key] += 1
        first = _counts["drift"][key] == 1
    if first:
        _log.warning(
            "route %s was admitted but its launcher refuses (%s); ran %s instead. Counted, logged once",
            route,
            reason,
            established,
        )


def snapshot() -> dict[str, dict[str, int]]:
    """Counts since the start or the last reset.

    Returns:
        "admitted" {route: decisions}, "refused" {"route: check": decisions}, "routes" {route: calls that ran it},
        "drift" {"route: reason": calls whose launcher refused the admitted route}. A plan is decided once and runs
        many times.
    """
    with _lock:
        return {kind: dict(counts) for kind, counts in _counts.items()}


def reset() -> None:
    """Start counting anew; what was logged once may be logged again."""
    with _lock:
        for counts in _counts.values():
            counts.clear()
