"""What a check finds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


class Checked(ABC):
    """What a check finds: `error` of the worst row, its `limit`, and a `fault`, empty where there is none."""

    error: float
    limit: float
    fault: str

    @property
    def ok(self) -> bool:
        """No fault, and the worst row within the limit."""
        return not self.fault and self.error <= self.limit

    @property
    def share(self) -> float:
        """The error in units of its limit; where that is 0, infinite or nothing."""
        if self.limit:
            return self.error / self.limit
        return math.inf if self.error else 0.0

    @abstractmethod
    def describe(self) -> str:
        """One line; for a failure with what it takes to run it again."""

    def __str__(self) -> str:
        return self.describe()

    def line(self, what: str) -> str:
        """The verdict on `what`."""
        verdict = "ok" if self.ok else "FAILED"
        return f"{verdict} {what}: error {self.error:.3g} (limit {self.limit:g}) {self.fault}".rstrip()


def named(variant: str, case: Any) -> str:
    """Variant and case in words; a drawn case names its variant itself."""
    said: str = case.describe()
    return said if hasattr(case, "variant") else f"{variant} {said}"


@dataclass(frozen=True)
class Finding(Checked):
    """What a check of a drawn case found: the error of the worst row in the unit of the tolerance, and what else is
    wrong. The case is its oracle's own."""

    case: Any
    error: float
    limit: float
    fault: str = ""

    def describe(self) -> str:
        """One line; for a failure with what it takes to run it again."""
        return self.line(self.case.describe())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"case": self.case.as_dict(), "error": self.error, "limit": self.limit, "fault": self.fault}
