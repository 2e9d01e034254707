"""How a row of logits becomes a token, and how many drafts of a block are kept.

Sampled acceptance treats a draft as a point mass (its q is one-hot): it is kept with the probability that the
target gives it, and otherwise replaced by a draw from the target's other tokens (Leviathan et al., arXiv:2211.17192,
with a one-hot q). One draw from the target does both: a draft is kept where it equals the draw. So a token takes one
draw, whatever was drafted, and a seed gives the tokens of plain sampling: not only their distribution. As far as the
logits are the same: `Engine` says where they differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.errors import InputError
from hipfire_kernels.model.layers import Array

Probabilities: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0.0 is greedy decoding, where the other three have no effect.
        top_k: only the k likeliest tokens; 0 for all.
        top_p: then only the likeliest tokens up to this much probability, the one that reaches it included.
        seed: of the random draws; None for a different one each time.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_real(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature!r}; legal are finite numbers from 0.0, which is greedy")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise InputError(f"top_k is {self.top_k!r}; legal are whole numbers from 0, which keeps every token")
        if not _is_real(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p!r}; legal are numbers above 0.0 and up to 1.0")
        if self.seed is not None and (not is_whole(self.seed) or self.seed < 0):
            raise InputError(f"seed is {self.seed!r}; legal are None and whole numbers from 0")

    def probabilities(self, logits: Array) -> Probabilities:
        """The distribution [vocab] that logits [vocab] stand for: temperature, top_k, softmax, top_p.

        Of equal logits the lower token id counts as the likelier. Needs a temperature above 0.
        """
        shifted = logits.astype(np.float64)
        shifted -= shifted.max()
        with np.errstate(over="ignore"):  # to -inf, which is right
            shifted /= self.temperature
        if not self.top_k and self.top_p == 1.0:
            return _normalised(np.exp(shifted))
        kept = np.argsort(-shifted, kind="stable")[: self.top_k or None]
        weights = _normalised(np.exp(shifted[kept]))
        before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
        nucleus = before < self.top_p
        result = np.zeros(len(shifted))
        result[kept[nucleus]] = _normalised(weights[nucleus])
        return result


class Chooser:
    """Chooses the tokens of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)

    def choose(self, drafts: Sequence[int], logits: Array) -> list[int]:
        """The drafts that are kept and one token more; row j of logits [len(drafts) + 1, vocab] judges draft j."""
        if self._sampling.temperature == 0.0:
            return accept_greedy(drafts, logits)
        return accept_sampled(drafts, map(self._sampling.probabilities, logits), self._rng)


def accept_greedy(drafts: Sequence[int], logits: Array) -> list[int]:
    """The leading drafts that equal the argmax of their rows, and the argmax of the row after them."""
    choices: list[int] = logits.argmax(axis=1).tolist()
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == choices[agreed]:
        agreed += 1
    return choices[: agreed + 1]


def accept_sampled(drafts: Sequence[int], rows: Iterable[Probabilities], rng: np.random.Generator) -> list[int]:
    """The leading drafts that equal the draws from their rows, and one draw more. Takes only the rows that it needs."""
    remaining = iter(rows)
    tokens: list[int] = []
    for draft in drafts:
        tokens.append(_draw(next(remaining), rng))
        if tokens[-1] != draft:
            return tokens
    return [*tokens, _draw(next(remaining), rng)]


def _draw(p: Probabilities, rng: np.random.Generator) -> int:
    return int(rng.choice(len(p), p=p))


def _normalised(weights: Probabilities) -> Probabilities:
    result: Probabilities = weights / weights.sum()
    return result


def is_whole(value: object) -> bool:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return is_whole(value) or isinstance(value, (float, np.floating))
