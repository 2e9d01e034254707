"""The seam to whoever proposes blocks: a draft model, or anything else that guesses the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hipfire_kernels.model.attention import Attention
from hipfire_kernels.model.config import TargetConfig
from hipfire_kernels.model.layers import Array

if TYPE_CHECKING:
    from hipfire_kernels.model.qwen35 import Target


class DraftSession(Protocol):
    """The proposer's side of one sequence. It is told of exactly the tokens that the target's state covers."""

    @property
    def length(self) -> int:
        """Tokens that it was told of and that were not taken back."""

    @property
    def max_context(self) -> int | None:
        """Tokens of context up to which it is asked; None for any number."""

    def extend(self, tokens: Sequence[int], taps: Array) -> None:
        """Take the next `tokens` of the sequence and their `taps` float32 [n, n_taps * hidden]: the target's
        tapped outputs."""

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def propose(self, anchor: int, rows: int) -> list[int]:
        """Proposals for the positions after the anchor, rows - 1 at most.

        The anchor is the token after those it was told of: the last known one, which the target has not seen yet.

        Raises:
            NumericsError: its numbers are not finite. The request goes on without a block, counted in its result.
        """


class Draft(Protocol):
    """Whoever proposes blocks for a target."""

    @property
    def block_size(self) -> int:
        """The most rows of a block: the anchor and block_size - 1 proposals."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs it wants to see."""

    def check_pairing(self, target: TargetConfig) -> None:
        """Raise CheckpointError when it cannot draft for this target."""

    def session(self, target: Target, attention: Attention) -> DraftSession:
        """A fresh session for one sequence."""
