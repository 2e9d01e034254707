"""What a new prompt can take over from an earlier request: the common prefix, and where the state can go back to.

A KV cache can be cut at any length, a recurrent state cannot: it resumes only where a snapshot of it was kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipfire_kernels.model.qwen35 import Snapshot

PREFILL_ROWS = 512
"""The most tokens of one prefill pass, and about the distance of the checkpoints along a sequence."""

TAIL_ROWS = 8
"""Where there are checkpoints, a prompt's last tokens get a pass of their own, so that one lies before them: chat
templates render the end of a prompt (the opening of the answer) differently once an answer follows."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def chunk_ends(begin: int, end: int, rows: int, tail: int = 0) -> list[int]:
    """Where the passes over tokens begin..end end: `rows` at most in each, the last `tail` in one of their own."""
    ends = [*range(begin + rows, end - tail, rows), end - tail, end]
    return sorted({at for at in ends if at > begin})


class Checkpoints:
    """Recurrent snapshots of one sequence, `limit` at most, shortest first.

    Beyond the limit, the one that leaves the smallest gap goes, so that they stay spread over the sequence. The last
    three stay: they are those of the last turn.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._saved: list[Snapshot] = []

    @property
    def last(self) -> int:
        """Tokens covered by the longest; 0 with none."""
        return self._saved[-1].length if self._saved else 0

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot that covers more than the last one; one that does not is known already."""
        if snapshot.length <= self.last:
            return
        self._saved.append(snapshot)
        if len(self._saved) > self.limit:
            lengths = [0, *(s.length for s in self._saved)]
            gaps = [after - before for before, after in zip(lengths, lengths[2:], strict=False)]
            del self._saved[gaps.index(min(gaps[: len(self._saved) - min(3, self.limit)]))]

    def latest(self, length: int) -> Snapshot | None:
        """The longest that covers at most `length` tokens."""
        return next((s for s in reversed(self._saved) if s.length <= length), None)

    def drop_beyond(self, length: int) -> None:
        """Forget those that cover more than `length` tokens."""
        self._saved = [s for s in self._saved if s.length <= length]
