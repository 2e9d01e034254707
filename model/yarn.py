"""YaRN: the RoPE frequencies of a model that was stretched beyond the context it was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Yarn:
    """YaRN's settings, under the names that config.json has (Peng et al. 2023, arXiv 2309.00071, section 3).

    A pair of dimensions that turns more than beta_fast times within the original context keeps its frequency, one
    that turns less than beta_slow times is slowed down by `factor`; between them a linear ramp over the index.

    Attributes:
        factor: how many times longer the context became.
        original_positions: the context before, original_max_position_embeddings.
        attention_factor: on cos and sin of every angle, so that q k^T has it squared.
        beta_fast, beta_slow: turns at the two ends of the ramp.
        truncate: whether the ramp begins and ends at whole indices.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, dim: int, theta: float) -> NDArray[np.float64]:
        """Radians per position of every pair, float64 [dim // 2]."""
        plain = np.power(theta, -np.arange(0, dim, 2, dtype=np.float64) / dim)
        low, high = (self._index(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001  # a ramp without width is a step
        slowed = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
        frequencies: NDArray[np.float64] = plain * (1 - slowed) + plain / self.factor * slowed
        return frequencies

    def _index(self, turns: float, dim: int, theta: float) -> float:
        """The index, a fraction, of the pair that turns this often within the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What the attention factor is where config.json does not say: 0.1 ln(factor) + 1, or a ratio of two such."""
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
