"""How often each route ran, and how often and why the launcher refused one that admission had let through."""

from __future__ import annotations

import logging
import threading
from collections import Counter

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_routes: Counter[str] = Counter()
_drift: Counter[str] = Counter()


def count_route(name: str) -> None:
    """One call ran this route."""
    with _lock:
        _routes[name] += 1


def count_drift(route: str, reason: str, established: str) -> None:
    """The launcher refused an admitted route. Logged the first time for each route and reason."""
    key = f"{route}: {reason}"
    with _lock:
        _drift[key] += 1
        first = _drift[key] == 1
    if first:
        _log.warning(
            "route %s was admitted but its launcher refuses (%s); ran %s instead. Counted, logged once",
            route,
            reason,
            established,
        )


def snapshot() -> dict[str, dict[str, int]]:
    """Counts since the start or the last reset: {"routes": {name: n}, "drift": {"route: reason": n}}."""
    with _lock:
        return {"routes": dict(_routes), "drift": dict(_drift)}


def reset() -> None:
    """Start counting anew; what was logged once may be logged again."""
    with _lock:
        _routes.clear()
        _drift.clear()
