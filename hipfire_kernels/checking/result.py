"""What a check finds."""

from __future__ import annotations


class Checked:
    """What a check finds: `error` of the worst row, its `limit`, and a `fault`, empty where there is none."""

    error: float
    limit: float
    fault: str

    @property
    def ok(self) -> bool:
        """No fault, and the worst row within the limit."""
        return not self.fault and self.error <= self.limit

    def line(self, what: str) -> str:
        """The verdict on `what`."""
        verdict = "ok" if self.ok else "FAILED"
        return f"{verdict} {what}: error {self.error:.3g} (limit {self.limit:g}) {self.fault}".rstrip()
