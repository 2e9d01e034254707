"""A proposer without a model: what followed the last tokens when they occurred before (prompt lookup).

Costs next to nothing and is right where text repeats: code, quotations, lists, a document that is being edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hipfire_kernels.errors import InputError
from hipfire_kernels.model.attention import Attention
from hipfire_kernels.model.config import TargetConfig
from hipfire_kernels.model.layers import BLOCK_ROWS, Array
from hipfire_kernels.model.request import check_count
from hipfire_kernels.running.arguments import I32_MAX

if TYPE_CHECKING:
    from hipfire_kernels.model.qwen35 import Target


@dataclass(frozen=True)
class NgramDraft:
    """Proposes for any target. Hands out nothing where the last tokens are new.

    Attributes:
        block_size: the most rows of a block, 2 to 32: the anchor and what is proposed.
        longest, shortest: tokens that have to recur, the longest match first. At least 1.

    Raises:
        InputError: a value outside its range.
    """

    block_size: int = 8
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        for name, least, largest in (
            ("block_size", 2, BLOCK_ROWS),
            ("longest", 1, I32_MAX),
            ("shortest", 1, I32_MAX),
        ):
            object.__setattr__(self, name, check_count(name, getattr(self, name), largest, least))
        if self.shortest > self.longest:
            raise InputError(f"shortest is {self.shortest} and longest {self.longest}; required: shortest <= longest")

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """None: it looks at tokens alone."""
        return ()

    def check_pairing(self, target: TargetConfig) -> None:
        """Fits every target."""

    def session(self, target: Target, attention: Attention) -> NgramSession:
        """An index of one sequence."""
        return NgramSession(range(self.longest, self.shortest - 1, -1))


class NgramSession:
    """The tokens of one sequence, and where every n-gram of them ends.

    Attributes:
        max_context: None: any number of tokens.
    """

    max_context = None

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # longest first
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    @property
    def length(self) -> int:
        """Tokens that it was told of and that were not taken back."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int], taps: Array) -> None:
        """Take the next `tokens` of the sequence; it has no use for `taps`."""
        for token in tokens:
            self._tokens.append(token)
            for ngram in self._last():
                self._ends.setdefault(ngram, []).append(len(self._tokens))

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        while len(self._tokens) > length:
            for ngram in self._last():
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
            self._tokens.pop()

    def propose(self, anchor: int, rows: int) -> list[int]:
        """What followed the latest earlier occurrence of the last tokens, anchor included: rows - 1 or none.

        Where that occurrence overlaps the end, the proposals run on into themselves: a period goes on.
        """
        for size in self._sizes:
            if size > len(self._tokens) + 1:
                continue
            ngram = (*self._tokens[len(self._tokens) + 1 - size :], anchor)
            if ends := self._ends.get(ngram):
                return self._continuation(ends[-1], anchor, rows - 1)
        return []

    def _continuation(self, begin: int, anchor: int, count: int) -> list[int]:
        """The `count` tokens from position `begin` on, in the sequence that they themselves go on."""
        known = [*self._tokens[begin:], anchor]
        while len(known) < count:
            known += known
        return known[:count]

    def _last(self) -> list[tuple[int, ...]]:
        """The n-grams that end the sequence."""
        return [tuple(self._tokens[-size:]) for size in self._sizes if size <= len(self._tokens)]
